// Bucket: gradients that travel in one collective. One flat buffer, one slot per parameter.
// Guarded by its owner's mutex, but for the time at which it was reduced.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/piecewise.h"
#include "reduce/gradient_access.h"
#include "reduce/warnings.h"

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
  at::Tensor view;   // of the buffer, laid out as the parameter is; undefined in a sparse bucket
  std::string name;  // qualified; empty if the bucket was not told
};

// Makes the memory of a buffer: so many elements, not initialised.
using MakeBuffer = std::function<at::Tensor(std::int64_t numel, const at::TensorOptions&)>;

struct BucketOptions {
  std::optional<at::ScalarType> dtype;  // of the buffer (mixed precision); absent: the parameters'
  bool sparse = false;                  // of one parameter, whose gradient is a sparse tensor
  bool batched = false;                 // copy_in only notes gradients, flush copies and divides all at once
  bool lazy = false;                    // see [Note: buffers on demand]
  MakeBuffer make_buffer;               // absent: ordinary memory
  std::vector<std::string> names;       // qualified, by slot; may be empty
  std::shared_ptr<Notices> notices = std::make_shared<Notices>();
};

// [Note: layout of a slot]
// A parameter whose memory is dense keeps its strides in the buffer (channels-last weights, transposed ones),
// so that its gradient, which autograd lays out alike, is copied as one run of bytes and can become the view
// itself. Any other parameter gets a row-major slot. Torch's reducer does the same, so a hook sees the same
// bytes.
at::Tensor slot_view(const at::Tensor& flat, const at::Tensor& variable, std::int64_t offset);

// Makes a backward through `leaf` alone, with which Python is to begin, tell how many references to the memory of a new
// gradient there are in a hook if nobody else has any. See [Note: reduced in place].
void learn_references(const at::Tensor& leaf);

class Bucket {
 public:
  // `variables[i]` is parameter `indices[i]`; all of one dtype and one device.
  Bucket(const std::vector<std::size_t>& indices, const std::vector<at::Tensor>& variables, BucketOptions options = {});

  // Notes that the collective shall read the gradient where it is, and write the average there, or into the slot's view
  // with `as_view`. `arrived`: what this backward brought, of which the gradient may have the memory. False if that
  // can't be: copy_in is to be called then. See [Note: reduced in place].
  bool take_in_place(std::size_t slot, const at::Tensor& gradient, const at::Tensor& arrived, bool as_view);
  // Whether there are such gradients; the array that they make with what was copied in, and its memory.
  bool in_place() const noexcept { return !in_place_.empty(); }
  std::pair<std::vector<SumPiece>, std::vector<at::Tensor>> pieces() const;
  // A part of what was reduced, in whose first element an error of another rank would be told.
  at::Tensor first_part(const at::Tensor& reduced) const;

  // Writes `gradient` divided by `divisor` (1: unchanged) into the slot; zeros if it is undefined. A gradient
  // that is the slot's own view is divided in place. With `as_view` the gradient becomes the view.
  // Returns true if `gradient` is another tensor now.
  bool copy_in(std::size_t slot, at::Tensor& gradient, int divisor, bool as_view);
  // Call it when all gradients are in, before the launch: writes those that copy_in has put off. See [Note: fused
  // copies].
  void flush(int divisor);

  // Which slots' gradients copy_out leaves alone; null: none.
  using Skip = c10::function_ref<bool(std::size_t slot)>;

  // Writes what was reduced back to the parameters' gradients. `reduced` is the buffer itself, or another
  // tensor of as many elements that a comm hook returned. With `as_view` the gradients become the views.
  // Throws, with `as_view`, if a gradient has become another tensor meanwhile.
  void copy_out(const at::Tensor& reduced, bool as_view, const GradientAccess& access, Skip skip = {});

  // What a rank contributes that has nothing to contribute; and what tells the others that it failed.
  void fill_zero();
  void fill_nan();

  // Sparse buckets: the rows (1-D, integers) that any rank's gradient may have from now on; undefined: any.
  // See [Note: known rows] in sparse_bucket.cpp.
  void set_known_rows(const at::Tensor& rows);
  std::optional<at::Tensor> known_rows() const;

  // To be called after copy_out: which step's averages the buffer holds, if it does; or that they are `elsewhere`, in
  // the gradients alone.
  void note_average(const at::Tensor& reduced, bool as_view, bool elsewhere, std::int64_t step);
  // These averages, by slot: views of the buffer, or gradients; empty if they were written to or replaced since. With
  // the GIL, or at the end of the backward, so that nobody replaces gradients meanwhile.
  std::vector<at::Tensor> averages(std::int64_t step) const;

  // Forgets the buffer and allocates another: a collective that was given up may still write into the old
  // one. Gradients that were views of the old buffer become views of the new one, with the values they have.
  void renew();

  // Allocates the buffer of a lazy bucket unless it is there; forgets the gradients of a backward, and lets go of the
  // buffer of a lazy bucket. See [Note: buffers on demand].
  void hold() {
    if (lazy_ && !buffer_.defined()) allocate();
  }
  void release();

  bool is_view(std::size_t slot, const at::Tensor& gradient) const;
  Notices& notices() const { return *notices_; }

  // 1-D; undefined in a lazy bucket between release() and hold(). Of a sparse bucket: the gradient (undefined before it
  // arrives), or its known rows.
  const at::Tensor& buffer() const noexcept { return buffer_; }
  const std::vector<Slot>& slots() const noexcept { return slots_; }
  std::int64_t numel() const noexcept { return numel_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  at::ScalarType dtype() const { return options_.dtype().toScalarType(); }
  c10::Device device() const { return options_.device(); }
  bool sparse() const noexcept { return sparse_; }

  // Of the backward that is armed or running; replaced when it is abandoned.
  std::shared_ptr<BucketTimes> times = std::make_shared<BucketTimes>();

 private:
  struct Deferred {
    std::size_t slot;
    at::Tensor gradient;
  };

  // One gradient that is reduced where it is.
  struct InPlace {
    at::Tensor source;  // undefined: it is not
    at::Tensor target;
  };

  void allocate();
  // The slot, ready for a gradient: with a buffer, and with a view of it.
  //
  // [Note: views that are pointed elsewhere] A gradient that is a slot's view is the user's: `model.double()` replaces
  // its data as that of a parameter. Then it is no view any more, and what is reduced would not reach it.
  const Slot& ready(std::size_t slot);
  void forget_in_place() noexcept { in_place_.clear(); }
  bool copy_from_in_place(std::size_t slot, at::Tensor& gradient) const;
  // Whether gradients of this slot are copied together with others.
  bool fuses(const Slot& slot) const noexcept;
  void forget_deferred();
  void write(const Slot& slot, const at::Tensor& gradient, int divisor);
  void warn_of_strides(const Slot& slot, const at::Tensor& gradient);
  void warn_of_graph(const Slot& slot);
  void divide(const at::Tensor& flat_or_view, std::int64_t numel, int divisor);
  // Whether loops of ours scale and divide its elements: float32 and float64.
  bool scales() const;
  // Both are plain memory in the same order, so that bytes can be copied (CPU only).
  bool plain(const Slot& slot, const at::Tensor& gradient) const;
  bool in_buffer(const at::Tensor& reduced) const;
  void point_at_views(const at::Tensor& reduced, const GradientAccess& access, Skip skip);
  void copy_to_gradients(const at::Tensor& reduced, const GradientAccess& access, Skip skip);

  bool copy_in_sparse(at::Tensor& gradient, int divisor);
  void copy_out_sparse(const at::Tensor& reduced, const GradientAccess& access, Skip skip);
  at::Tensor known_rows_of(const at::Tensor& gradient) const;

  std::vector<Slot> slots_;
  at::Tensor buffer_;
  c10::TensorOptions options_;
  MakeBuffer make_buffer_;
  std::int64_t numel_ = 0;
  std::int64_t bytes_ = 0;
  std::vector<Deferred> deferred_;      // what flush copies in
  std::vector<std::size_t> undivided_;  // these, and those that are views: what flush divides
  std::vector<InPlace> in_place_;       // by slot; empty without any
  std::shared_ptr<Notices> notices_;
  at::Tensor known_rows_;
  at::Tensor scale_;  // 1 / scaled_by_, as torch multiplies by it
  int scaled_by_ = 0;
  // A gradient that held the average, which may be gone.
  struct Averaged {
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient;
    std::uint32_t version;
  };

  std::int64_t averaged_in_ = -1;   // the step of which the buffer, at `version_`, or `averaged_` holds the averages
  std::vector<Averaged> averaged_;  // by slot; empty: the buffer does
  std::uint32_t version_ = 0;
  bool cpu_ = false;
  bool sparse_ = false;
  bool batched_ = false;
  bool divided_some_ = false;  // of this backward, so that flush can't divide the whole buffer at once
  bool lazy_ = false;
};

}  // namespace ddp_lab
