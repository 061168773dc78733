#include "reduce/bucket.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <limits>

namespace ddp_lab {

at::Tensor slot_view(const at::Tensor& flat, const at::Tensor& variable, std::int64_t offset) {
  if (variable.is_non_overlapping_and_dense()) {
    return flat.as_strided(variable.sizes(), variable.strides(), flat.storage_offset() + offset);
  }
  return flat.narrow(0, offset, variable.numel()).view(variable.sizes());
}

Bucket::Bucket(const std::vector<std::size_t>& indices, const std::vector<at::Tensor>& variables, BucketOptions options)
    : make_buffer_(std::move(options.make_buffer)),
      notices_(std::move(options.notices)),
      sparse_(options.sparse),
      batched_(options.batched && !options.sparse),
      lazy_(options.lazy && !options.sparse) {
  TORCH_CHECK(!variables.empty(), "Empty bucket specified.");
  TORCH_CHECK(!sparse_ || variables.size() == 1,
              "Buckets with more than one variable cannot include variables that expect a sparse gradient.");
  const at::Tensor& first = variables.front();
  cpu_ = first.device().is_cpu();
  options_ = at::TensorOptions().dtype(options.dtype.value_or(first.scalar_type())).device(first.device());
  slots_.reserve(variables.size());
  for (std::size_t i = 0; i < variables.size(); ++i) {
    const at::Tensor& variable = variables[i];
    TORCH_CHECK(variable.layout() == at::kStrided, "No support for sparse tensors.");
    Slot slot;
    slot.parameter = indices[i];
    slot.offset = numel_;
    slot.numel = variable.numel();
    slot.variable = variable;
    if (i < options.names.size()) slot.name = std::move(options.names[i]);
    slots_.push_back(std::move(slot));
    TORCH_CHECK(variable.dtype() == first.dtype() && variable.device() == first.device(),
                "the parameters of a bucket must have the same dtype and device, but '", slots_.front().name, "' is ",
                first.scalar_type(), " on ", first.device(), " and '", slots_.back().name, "' is ",
                variable.scalar_type(), " on ", variable.device());
    numel_ += variable.numel();
  }
  bytes_ = numel_ * static_cast<std::int64_t>(options_.dtype().itemsize());
  if (!lazy_) allocate();
}

void Bucket::allocate() {
  if (sparse_) {
    buffer_ = at::Tensor();
    return;
  }
  const at::NoGradGuard no_grad;
  buffer_ = make_buffer_ ? make_buffer_(numel_, options_) : at::empty({numel_}, options_);
  for (Slot& slot : slots_) slot.view = slot_view(buffer_, slot.variable, slot.offset);
}

const Slot& Bucket::ready(std::size_t index) {
  hold();
  Slot& slot = slots_[index];
  const bool whole =
      slot.view.is_alias_of(buffer_) && slot.view.storage_offset() == buffer_.storage_offset() + slot.offset;
  if (!whole) slot.view = slot_view(buffer_, slot.variable, slot.offset);
  return slot;
}

bool Bucket::is_view(std::size_t slot, const at::Tensor& gradient) const {
  const at::Tensor& view = slots_[slot].view;
  return gradient.defined() && view.defined() && gradient.is_alias_of(view) &&
         gradient.storage_offset() == view.storage_offset();
}

void Bucket::renew() {
  const at::NoGradGuard no_grad;
  std::vector<bool> was_view(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    at::Tensor& gradient = slots_[i].variable.mutable_grad();
    was_view[i] = is_view(i, gradient);
    const bool written_to = in_place() && gradient.defined() && gradient.is_same(in_place_[i].target);
    if (written_to && !was_view[i]) gradient = gradient.clone();
  }
  forget_deferred();
  forget_in_place();
  allocate();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!was_view[i]) continue;
    slots_[i].view.copy_(slots_[i].variable.grad());
    slots_[i].variable.mutable_grad() = slots_[i].view;
  }
  release();
}

// [Note: buffers on demand]
// A forward needs memory for what its backward will use, and the backward gives it back while gradients appear. With
// lazy_bucket_allocation the buffer of a dense bucket exists from the first of its gradients (`Bucket::hold`) to the
// end of the backward (`BucketSet::release_lazy`), so that it is not there beside the activations at their peak. All
// that else holds it goes as well: the collective's work. Gradients that are views of it (gradient_as_bucket_view) keep
// it for themselves; the next backward copies them into new ones. So does a hook that keeps its GradBucket.
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

void Bucket::warn_of_strides(const Slot& slot, const at::Tensor& gradient) {
  if (notices_->strides || gradient.sizes() != slot.view.sizes()) return;
  bool same = true;
  for (std::int64_t d = 0; d < gradient.dim(); ++d) {
    same = same && (gradient.size(d) == 1 || gradient.stride(d) == slot.view.stride(d));
  }
  if (same) return;
  notices_->strides = true;
  notices_->unsaid.add(c10::str(
      "Grad strides do not match bucket view strides. This is not an error, but copies of the gradient are slow: that ",
      "of '", slot.name, "' has sizes ", gradient.sizes(), " and strides ", gradient.strides(),
      ", its bucket's view has strides ", slot.view.strides(),
      ". Either something made it with another memory format than its parameter's, or the parameter's memory ",
      "format has changed since the model was wrapped."));
}

void Bucket::warn_of_graph(const Slot& slot) {
  constexpr std::int64_t kEvery = 1000;
  if (notices_->graphs++ % kEvery != 0) return;
  notices_->unsaid.add(c10::str(
      "Using DistributedDataParallel with create_graph=True is not well-supported. Gradients are averaged (first ",
      "that of '", slot.name, "'), but differentiating them again goes through this rank's own graph and ",
      "communicates nothing: average what you get from that yourself, or let another backward() do it."));
}

void Bucket::fill_zero() {
  const at::NoGradGuard no_grad;
  forget_deferred();
  if (!sparse_) {
    hold();
    buffer_.zero_();
    return;
  }
  at::Tensor nothing = at::zeros(slots_.front().variable.sizes(), options_.layout(at::kSparse));
  copy_in_sparse(nothing, 1);
}

void Bucket::fill_nan() {
  fill_zero();
  if (sparse_ || numel_ == 0) return;  // ranks that wait need any answer; nobody reads this one
  buffer_.fill_(std::numeric_limits<double>::quiet_NaN());
}

}  // namespace ddp_lab
