// Bucket's copies of dense gradients: into its buffer, and back.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <cstring>

#include "reduce/bucket.h"

namespace ddp_lab {
namespace {

// -- loops over plain CPU memory: several threads where torch's own elementwise loops would use them, and the same bits

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
void divide_by(void* data, int divisor, std::int64_t numel) {
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

// to[i] = from[i] * scale, where `scale` is rounded to `dtype` first.
void copy_scaled(at::ScalarType dtype, void* to, const void* from, double scale, std::int64_t numel) {
  if (dtype == at::kFloat) {
    scale_into<float>(to, from, scale, numel);
  } else {
    scale_into<double>(to, from, scale, numel);
  }
}

// data[i] /= divisor
void divide_in_place(at::ScalarType dtype, void* data, int divisor, std::int64_t numel) {
  if (dtype == at::kFloat) {
    divide_by<float>(data, divisor, numel);
  } else {
    divide_by<double>(data, divisor, numel);
  }
}

}  // namespace

// Other dtypes go through torch's operators.
bool Bucket::scales() const { return dtype() == at::kFloat || dtype() == at::kDouble; }

// [Note: fused copies]
// To launch a kernel takes the host of a device several microseconds, in which the device copies megabytes. So
// gradients that are smaller than that wait until their bucket is ready: one launch copies a hundred of them, another
// divides them. Larger ones are written at once, divided on the way in a single pass over their memory. The way back is
// the same. With batched_grad_copy every gradient waits, on a CPU as well.
constexpr std::int64_t kFusedBytes = std::int64_t{1} << 20;

bool Bucket::fuses(const Slot& slot) const noexcept {
  return batched_ || (!cpu_ && slot.numel * static_cast<std::int64_t>(options_.dtype().itemsize()) < kFusedBytes);
}

void Bucket::forget_deferred() {
  deferred_.clear();
  undivided_.clear();
  divided_some_ = false;
}

bool Bucket::plain(const Slot& slot, const at::Tensor& gradient) const {
  return cpu_ && gradient.key_set() == slot.view.key_set() && gradient.dtype() == slot.view.dtype() &&
         gradient.sizes() == slot.view.sizes() &&
         ((gradient.is_contiguous() && slot.view.is_contiguous()) || gradient.strides() == slot.view.strides());
}

bool Bucket::in_buffer(const at::Tensor& reduced) const {
  return reduced.is_alias_of(buffer_) && reduced.storage_offset() == buffer_.storage_offset() &&
         reduced.dtype() == buffer_.dtype();
}

bool Bucket::copy_in(std::size_t index, at::Tensor& gradient, int divisor, bool as_view) {
  if (sparse_) return copy_in_sparse(gradient, divisor);
  const Slot& slot = ready(index);
  if (!gradient.defined()) {
    slot.view.zero_();
    return false;
  }
  const bool already = is_view(index, gradient);
  if (fuses(slot)) {
    undivided_.push_back(index);
    if (!already) {
      warn_of_strides(slot, gradient);
      deferred_.push_back({index, gradient});
    }
  } else {
    divided_some_ = true;
    already ? divide(slot.view, slot.numel, divisor) : write(slot, gradient, divisor);
  }
  const bool graph = gradient.requires_grad();
  if (graph) warn_of_graph(slot);
  // [Note: gradients with a graph]
  // backward(create_graph=True) brings gradients that can be differentiated again. They stay what they are, and
  // copy_out writes the average into them: a view of the buffer would cut them off from their graph.
  if (!as_view || already || graph) return false;
  gradient = slot.view;
  return true;
}

void Bucket::divide(const at::Tensor& data, std::int64_t numel, int divisor) {
  if (divisor == 1) return;
  if (cpu_ && scales()) return divide_in_place(dtype(), data.mutable_data_ptr(), divisor, numel);
  const at::NoGradGuard no_grad;
  at::Tensor target = data;
  target.div_(divisor);
}

void Bucket::write(const Slot& slot, const at::Tensor& gradient, int divisor) {
  const bool same = plain(slot, gradient);
  if (same && divisor == 1) {
    return copy_bytes(slot.view.mutable_data_ptr(), gradient.const_data_ptr(),
                      slot.numel * static_cast<std::int64_t>(options_.dtype().itemsize()));
  }
  if (!same) warn_of_strides(slot, gradient);
  const double scale = 1.0 / divisor;
  if (same && scales()) {
    return copy_scaled(dtype(), slot.view.mutable_data_ptr(), gradient.const_data_ptr(), scale, slot.numel);
  }
  const at::NoGradGuard no_grad;
  at::Tensor view = slot.view;
  if (divisor == 1) {
    view.copy_(gradient);
    return;
  }
  if (scaled_by_ != divisor) {
    scale_ = at::native::wrapped_scalar_tensor(scale);
    scaled_by_ = divisor;
  }
  at::mul_out(view, gradient, scale_);
}

void Bucket::flush(int divisor) {
  if (undivided_.empty()) return;
  const at::NoGradGuard no_grad;
  // As torch rounds it: complex numbers are divided as pairs of real ones.
  const auto real = [](const at::Tensor& data) { return data.is_complex() ? at::view_as_real(data) : data; };
  std::vector<at::Tensor> views, gradients;
  for (Deferred& deferred : deferred_) {
    views.push_back(slots_[deferred.slot].view);
    gradients.push_back(std::move(deferred.gradient));
  }
  if (!views.empty()) at::_foreach_copy_(views, gradients);
  if (!divided_some_) {
    divide(real(buffer_), numel_, divisor);
  } else if (divisor != 1) {
    views.clear();
    for (const std::size_t index : undivided_) views.push_back(real(slots_[index].view));
    at::_foreach_mul_(views, 1.0 / divisor);
  }
  forget_deferred();
}

void Bucket::copy_out(const at::Tensor& reduced, bool as_view, const GradientAccess& access, Skip skip) {
  const at::NoGradGuard no_grad;
  if (sparse_) return copy_out_sparse(reduced, access, skip);
  if (as_view) {
    point_at_views(reduced, access, skip);
  } else {
    copy_to_gradients(reduced, access, skip);
  }
  forget_in_place();
}

void Bucket::note_average(const at::Tensor& reduced, bool as_view, bool elsewhere, std::int64_t step) {
  averaged_.clear();
  averaged_in_ = -1;
  if (sparse_ || buffer_.is_inference()) return;
  if (elsewhere && !as_view) {
    for (const Slot& slot : slots_) {
      const at::Tensor& gradient = slot.variable.grad();
      if (!gradient.defined() || gradient.is_inference()) return averaged_.clear();
      averaged_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr()),
                           static_cast<std::uint32_t>(gradient._version())});
    }
  } else if (as_view || in_buffer(reduced)) {
    version_ = static_cast<std::uint32_t>(buffer_._version());
  } else {
    return;
  }
  averaged_in_ = step;
}

std::vector<at::Tensor> Bucket::averages(std::int64_t step) const {
  if (averaged_in_ != step || !buffer_.defined() || buffer_.is_inference()) return {};
  std::vector<at::Tensor> found;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (averaged_.empty()) {
      found.push_back(slots_[i].view);
      continue;
    }
    const at::Tensor& gradient = slots_[i].variable.grad();
    const auto noted = averaged_[i].gradient.lock();
    if (!noted || noted != gradient.getIntrusivePtr() ||
        averaged_[i].version != static_cast<std::uint32_t>(gradient._version())) {
      return {};
    }
    found.push_back(gradient);
  }
  if (averaged_.empty() && version_ != static_cast<std::uint32_t>(buffer_._version())) return {};
  return found;
}

void Bucket::point_at_views(const at::Tensor& reduced, const GradientAccess& access, Skip skip) {
  if (!in_buffer(reduced)) buffer_.copy_(reduced.reshape(buffer_.sizes()));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (skip && skip(i)) continue;
    const Slot& slot = slots_[i];
    access.with(slot.variable, [&](at::Tensor& gradient) {
      const bool waits = in_place() && gradient.is_same(in_place_[i].source);
      if (!gradient.defined() || waits) {
        gradient = slot.view;
      } else if (gradient.requires_grad()) {  // see [Note: gradients with a graph]
        gradient.copy_(slot.view);
      } else {
        TORCH_CHECK(is_view(i, gradient),
                    "Detected at least one parameter gradient is not the expected DDP bucket view with ",
                    "gradient_as_bucket_view=True. It is the gradient of '", slot.name,
                    "': something assigned its .grad during the backward.");
      }
      return true;
    });
  }
}

void Bucket::copy_to_gradients(const at::Tensor& reduced, const GradientAccess& access, Skip skip) {
  const bool buffered = in_buffer(reduced);
  const at::Tensor flat = buffered ? buffer_ : reduced.to(options_.dtype()).contiguous().view({numel_});
  std::vector<at::Tensor> targets, sources;  // what a device copies in one kernel
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (skip && skip(i)) continue;
    const Slot& slot = slots_[i];
    const at::Tensor source = buffered ? slot.view : slot_view(flat, slot.variable, slot.offset);
    access.with(slot.variable, [&](at::Tensor& gradient) {
      if (copy_from_in_place(i, gradient)) return true;
      if (!gradient.defined()) {
        gradient = torch::autograd::utils::clone_obey_contract(source, slot.variable);
      } else if (plain(slot, gradient)) {
        copy_bytes(gradient.mutable_data_ptr(), source.const_data_ptr(),
                   slot.numel * static_cast<std::int64_t>(options_.dtype().itemsize()));
        gradient.unsafeGetTensorImpl()->bump_version();
      } else if (!cpu_ && fuses(slot) && gradient.dtype() == source.dtype() && gradient.layout() == at::kStrided) {
        targets.push_back(gradient);
        sources.push_back(source);
      } else {
        gradient.copy_(source);
      }
      return true;
    });
  }
  if (!targets.empty()) at::_foreach_copy_(targets, sources);
}

}  // namespace ddp_lab
