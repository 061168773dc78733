#include "reduce/bucket.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <cstring>

namespace ddp_lab {
namespace {

// As many elements as torch's own elementwise loops give to one thread at least.
constexpr std::int64_t kGrain = 32768;

template <typename T>
void scale_into(void* to, const void* from, double scale, std::int64_t numel) {
  T* const target = static_cast<T*>(to);
  const T* const source = static_cast<const T*>(from);
  const T factor = static_cast<T>(scale);
  at::parallel_for(0, numel, kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) target[i] = source[i] * factor;
  });
}

template <typename T>
void divide_in_place(void* data, int divisor, std::int64_t numel) {
  T* const values = static_cast<T*>(data);
  const T by = static_cast<T>(divisor);
  at::parallel_for(0, numel, kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) values[i] /= by;
  });
}

void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  at::parallel_for(0, bytes, kGrain * 4, [=](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

// [Note: layout of a slot]
// A parameter whose memory is dense keeps its strides in the buffer (channels-last weights, transposed ones),
// so that its gradient, which autograd lays out alike, is copied as one run of bytes and can become the view
// itself. Any other parameter gets a row-major slot. Torch's reducer does the same, so a hook sees the same
// bytes.
at::Tensor view_of(const at::Tensor& flat, const Slot& slot) {
  if (slot.variable.is_non_overlapping_and_dense()) {
    return flat.as_strided(slot.variable.sizes(), slot.variable.strides(), slot.offset);
  }
  return flat.narrow(0, slot.offset, slot.numel).view(slot.variable.sizes());
}

}  // namespace

Bucket::Bucket(const std::vector<std::size_t>& indices, const std::vector<at::Tensor>& variables) {
  const at::Tensor& first = variables.front();
  cpu_ = first.device().is_cpu();
  options_ = at::TensorOptions().dtype(first.dtype()).device(first.device());
  slots_.reserve(variables.size());
  for (std::size_t i = 0; i < variables.size(); ++i) {
    const at::Tensor& variable = variables[i];
    TORCH_CHECK(variable.dtype() == first.dtype() && variable.device() == first.device(),
                "the parameters of a bucket must have the same dtype and device");
    Slot slot;
    slot.parameter = indices[i];
    slot.offset = numel_;
    slot.numel = variable.numel();
    slot.variable = variable;
    slots_.push_back(std::move(slot));
    numel_ += variable.numel();
  }
  allocate();
}

void Bucket::allocate() {
  const at::NoGradGuard no_grad;
  buffer_ = at::empty({numel_}, options_);
  bytes_ = static_cast<std::int64_t>(buffer_.nbytes());
  for (Slot& slot : slots_) slot.view = view_of(buffer_, slot);
}

bool Bucket::plain(const Slot& slot, const at::Tensor& gradient) const {
  return cpu_ && gradient.key_set() == slot.view.key_set() && gradient.sizes() == slot.view.sizes() &&
         ((gradient.is_contiguous() && slot.view.is_contiguous()) || gradient.strides() == slot.view.strides());
}

bool Bucket::is_view(std::size_t slot, const at::Tensor& gradient) const {
  const at::Tensor& view = slots_[slot].view;
  return gradient.defined() && gradient.is_alias_of(view) && gradient.storage_offset() == view.storage_offset();
}

void Bucket::copy_in(std::size_t index, const at::Tensor& gradient, int divisor) {
  const Slot& slot = slots_[index];
  if (!gradient.defined()) {
    slot.view.zero_();
    return;
  }
  const bool is_float = options_.dtype() == caffe2::TypeMeta::Make<float>();
  const bool is_double = options_.dtype() == caffe2::TypeMeta::Make<double>();
  if (is_view(index, gradient)) {
    if (divisor == 1) return;
    if (cpu_ && is_float) return divide_in_place<float>(slot.view.mutable_data_ptr(), divisor, slot.numel);
    if (cpu_ && is_double) return divide_in_place<double>(slot.view.mutable_data_ptr(), divisor, slot.numel);
    slot.view.div_(divisor);
    return;
  }
  const bool same = plain(slot, gradient);
  if (divisor == 1) {
    if (!same) {
      slot.view.copy_(gradient);
    } else {
      copy_bytes(slot.view.mutable_data_ptr(), gradient.const_data_ptr(),
                 slot.numel * static_cast<std::int64_t>(options_.dtype().itemsize()));
    }
    return;
  }
  const double scale = 1.0 / divisor;
  if (same && is_float) {
    return scale_into<float>(slot.view.mutable_data_ptr(), gradient.const_data_ptr(), scale, slot.numel);
  }
  if (same && is_double) {
    return scale_into<double>(slot.view.mutable_data_ptr(), gradient.const_data_ptr(), scale, slot.numel);
  }
  if (scaled_by_ != divisor) {
    scale_ = at::native::wrapped_scalar_tensor(scale);
    scaled_by_ = divisor;
  }
  at::Tensor view = slot.view;
  at::mul_out(view, gradient, scale_);
}

std::vector<at::Tensor> Bucket::views_of(const at::Tensor& flat) const {
  std::vector<at::Tensor> views;
  views.reserve(slots_.size());
  for (const Slot& slot : slots_) views.push_back(view_of(flat, slot));
  return views;
}

void Bucket::copy_out(const at::Tensor& reduced, bool as_view) {
  const bool in_buffer = reduced.is_alias_of(buffer_) && reduced.storage_offset() == buffer_.storage_offset() &&
                         reduced.dtype() == buffer_.dtype();
  if (as_view) {
    if (!in_buffer) buffer_.copy_(reduced.reshape(buffer_.sizes()));
    for (const Slot& slot : slots_) {
      if (!slot.variable.grad().defined()) slot.variable.mutable_grad() = slot.view;
    }
    return;
  }
  std::vector<at::Tensor> elsewhere;
  if (!in_buffer) elsewhere = views_of(reduced.contiguous().view({numel_}));
  std::vector<at::Tensor> targets, sources;  // what a device copies in one kernel
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const at::Tensor& source = in_buffer ? slot.view : elsewhere[i];
    at::Tensor& gradient = slot.variable.mutable_grad();
    if (!gradient.defined()) {
      gradient = torch::autograd::utils::clone_obey_contract(source, slot.variable);
    } else if (plain(slot, gradient) && source.dtype() == gradient.dtype()) {
      copy_bytes(gradient.mutable_data_ptr(), source.const_data_ptr(),
                 slot.numel * static_cast<std::int64_t>(options_.dtype().itemsize()));
      gradient.unsafeGetTensorImpl()->bump_version();
    } else if (!cpu_ && gradient.dtype() == source.dtype() && gradient.layout() == at::kStrided) {
      targets.push_back(gradient);
      sources.push_back(source);
    } else {
      gradient.copy_(source);
    }
  }
  if (!targets.empty()) at::_foreach_copy_(targets, sources);
}

void Bucket::renew() {
  const at::NoGradGuard no_grad;
  std::vector<bool> was_view(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) was_view[i] = is_view(i, slots_[i].variable.grad());
  allocate();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!was_view[i]) continue;
    slots_[i].view.copy_(slots_[i].variable.grad());
    slots_[i].variable.mutable_grad() = slots_[i].view;
  }
}

}  // namespace ddp_lab
