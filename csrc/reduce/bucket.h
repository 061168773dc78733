// Bucket: gradients that travel in one collective. One flat buffer, one slot per parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ddp_lab {

// When the parts of one bucket's way through one backward happened (host time in ns; 0: not yet).
// The future's callback holds a reference of its own: it may run after the reducer is gone.
struct BucketTimes {
  std::int64_t first_ready = 0;
  std::int64_t ready = 0;
  std::int64_t launched = 0;
  std::atomic<std::int64_t> reduced{0};
};

// One gradient's place in a bucket.
struct Slot {
  std::size_t parameter = 0;  // index in the reducer's order of registration
  std::int64_t offset = 0;    // in elements
  std::int64_t numel = 0;
  at::Tensor variable;
  at::Tensor view;  // of the buffer, laid out as the parameter is: see [Note: layout of a slot]
};

class Bucket {
 public:
  // `variables[i]` is parameter `indices[i]`; all of one dtype and one device.
  Bucket(const std::vector<std::size_t>& indices, const std::vector<at::Tensor>& variables);

  // Writes `gradient` divided by `divisor` (1: unchanged) into the slot; zeros if it is undefined. A gradient
  // that is the slot's own view is divided in place.
  void copy_in(std::size_t slot, const at::Tensor& gradient, int divisor);

  // Writes what was reduced back to the parameters' gradients. `reduced` is the buffer itself, or another
  // tensor of as many elements that a comm hook returned. With `as_view` the gradients become the views.
  void copy_out(const at::Tensor& reduced, bool as_view);

  // Forgets the buffer and allocates another: a collective that was given up may still write into the old
  // one. Gradients that were views of the old buffer become views of the new one, with the values they have.
  void renew();

  bool is_view(std::size_t slot, const at::Tensor& gradient) const;

  const at::Tensor& buffer() const noexcept { return buffer_; }
  const std::vector<Slot>& slots() const noexcept { return slots_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  c10::Device device() const { return buffer_.device(); }

  // Of the backward that is armed or running; replaced when it is abandoned.
  std::shared_ptr<BucketTimes> times = std::make_shared<BucketTimes>();

 private:
  void allocate();
  std::vector<at::Tensor> views_of(const at::Tensor& flat) const;
  // Both are plain memory in the same order, so that bytes can be copied (CPU only).
  bool plain(const Slot& slot, const at::Tensor& gradient) const;

  std::vector<Slot> slots_;
  at::Tensor buffer_;
  c10::TensorOptions options_;
  std::int64_t numel_ = 0;
  std::int64_t bytes_ = 0;
  at::Tensor scale_;  // 1 / scaled_by_, as torch multiplies by it
  int scaled_by_ = 0;
  bool cpu_ = false;
};

}  // namespace ddp_lab
