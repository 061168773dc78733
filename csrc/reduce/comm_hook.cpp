#include "reduce/comm_hook.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include <utility>
#include <vector>

namespace ddp_lab {
namespace {

// Backends know no complex numbers: they sum real and imaginary parts as two reals.
at::Tensor as_reals(const at::Tensor& buffer) { return buffer.is_complex() ? at::view_as_real(buffer) : buffer; }

}  // namespace

Launched start_all_reduce(c10d::ProcessGroup& group, const Bucket& bucket) {
  std::vector<at::Tensor> tensors{as_reals(bucket.buffer())};
  Launched launched;
  launched.work = group.allreduce(tensors);
  launched.future = launched.work->getFuture();
  return launched;
}

Launched start_hook(c10d::CommHookInterface& hook, const Bucket& bucket, std::size_t index, std::size_t count) {
  TORCH_CHECK(!bucket.buffer().is_complex(), "comm hooks see real buffers: bucket ", index,
              " holds complex gradients; train these parameters without a hook");
  const std::size_t n = bucket.slots().size();
  std::vector<std::size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  offsets.reserve(n);
  lengths.reserve(n);
  sizes.reserve(n);
  parameters.reserve(n);
  for (const Slot& slot : bucket.slots()) {
    offsets.push_back(static_cast<std::size_t>(slot.offset));
    lengths.push_back(static_cast<std::size_t>(slot.numel));
    sizes.push_back(slot.view.sizes());
    parameters.push_back(slot.variable);
  }
  c10d::GradBucket view(index, count, bucket.buffer(), std::move(offsets), std::move(lengths), std::move(sizes),
                        std::move(parameters), std::nullopt);
  Launched launched;
  launched.future = hook.runHook(view);
  return launched;
}

at::Tensor wait_for(const Launched& launched, c10d::CommHookInterface* hook, const Bucket& bucket, std::size_t index) {
  if (launched.work) {
    launched.work->wait();
    return bucket.buffer();
  }
  launched.future->waitAndThrow();
  at::Tensor reduced = hook->parseHookResult(launched.future->value());
  TORCH_CHECK(reduced.numel() == bucket.buffer().numel() && reduced.device() == bucket.device(),
              "the comm hook's future for bucket ", index, " holds a tensor of ", reduced.numel(), " elements on ",
              reduced.device(), "; the bucket has ", bucket.buffer().numel(), " on ", bucket.device());
  return reduced;
}

}  // namespace ddp_lab
