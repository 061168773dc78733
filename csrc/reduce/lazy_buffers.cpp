// Bucket's and Reducer's part for lazy_bucket_allocation: when the memory of the buckets is held.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "reduce/reducer.h"

namespace ddp_lab {

// [Note: buffers on demand]
// A forward needs memory for what its backward will use, and the backward gives it back while gradients appear. With
// lazy_bucket_allocation the buffer of a dense bucket exists from the first of its gradients (`Bucket::hold`) to the
// end of the backward (`release_buffers`), so that it is not there beside the activations at their peak. All that else
// holds it goes as well: the collective's work. Gradients that are views of it (gradient_as_bucket_view) keep it for
// themselves; the next backward copies them into new ones. So does a hook that keeps its GradBucket.
//
// Whoever looks at a buffer outside a backward calls hold() first: zeros of a rank that has joined, NaN for a shared
// error. What a bucket is (numel, bytes, dtype, device) needs no buffer.
void Bucket::release() {
  forget_deferred();
  forget_in_place();
  if (!lazy_ || !buffer_.defined()) return;
  if (!cpu_) {
    // The end of the backward may run on another stream than the one that allocated: its copies come first.
    const c10::impl::VirtualGuardImpl device(options_.device().type());
    device.recordDataPtrOnStream(buffer_.storage().data_ptr(), device.getStream(buffer_.device()));
  }
  buffer_ = at::Tensor();
  for (Slot& slot : slots_) slot.view = at::Tensor();
}

void Reducer::release_buffers() {
  if (!options_.lazy_bucket_allocation) return;
  for (const auto& bucket : buckets_) bucket->release();
  for (Launched& launched : launched_) launched = Launched{};
}

}  // namespace ddp_lab
