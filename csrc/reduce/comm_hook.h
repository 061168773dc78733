// How the gradients of a bucket are averaged over the ranks: all_reduce, or a comm hook and what it is given.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <typeinfo>
#include <utility>
#include <vector>

#include "reduce/bucket.h"

namespace ddp_lab {

// The group is released without the GIL: see [Note: who destroys the process group] in bindings/reducer.cpp.
using GroupPointer = std::shared_ptr<c10d::ProcessGroup>;
using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

// [Note: what a hook sees]
// The buffer is flat; one of complex gradients is given as twice as many reals, since backends sum reals. While a hook
// of the user's has it, each gradient in it is row-major, whatever its parameter's strides are: `gradients()` are views
// of the buffer that any code can take for matrices (PowerSGD does, by `view`). Torch leaves channels-last gradients as
// they are and cuts them out as if they were row-major, and cuts complex ones at wrong offsets. The strides come back
// with the result (reduction.cpp). A sparse bucket's buffer is the gradient itself.
// A hook may keep its GradBucket for longer than the reducer keeps the Bucket.

// What a comm hook is given: torch's class, with gradients that are right for every parameter.
class GradBucket : public c10d::GradBucket {
 public:
  GradBucket(const Bucket& bucket, std::size_t index, std::size_t count);

  // One tensor for each parameter, of its shape, in the buffer as it is now: set_buffer may have replaced it by one of
  // another dtype.
  std::vector<at::Tensor> gradients() const;

 private:
  bool sparse_;
  bool complex_;
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;  // offset and numel of each parameter
};

// Backends know no complex numbers: they sum real and imaginary parts as two reals.
at::Tensor as_reals(const at::Tensor& tensor);

// Replaces the average over the ranks. Torch's CommHookInterface, but that a hook owns its GradBucket (Python may keep
// it, and needs no copy) and that it has a name.
class CommHook {
 public:
  explicit CommHook(std::string name) : name_(std::move(name)) {}
  virtual ~CommHook() = default;
  CommHook(const CommHook&) = delete;
  CommHook& operator=(const CommHook&) = delete;

  // Starts the communication of a bucket whose gradients are undivided.
  virtual FuturePointer run(std::unique_ptr<GradBucket> bucket) = 0;
  // The tensor in what run's future holds. Throws if that is anything else.
  virtual at::Tensor result(const c10::IValue& value) const;
  // May it ask for the bucket's gradients one by one? See [Note: what a hook sees].
  virtual bool reads_gradients() const { return false; }
  // The model uses another group from now on. A hook of the user's has state of its own.
  virtual void set_group(GroupPointer) {}

  const std::string& name() const noexcept { return name_; }
  bool warned = false;  // of a result that had another dtype

 private:
  const std::string name_;
};
using HookPointer = std::unique_ptr<CommHook>;

// Torch's ALLREDUCE and FP16_COMPRESS, in C++: they need no GIL.
HookPointer make_builtin_hook(c10d::BuiltinCommHookType kind, GroupPointer group);

// [Note: who holds the sum]
// The groups that torch makes reduce in place, and wait() of their works says when they have. Of any other class of
// group, such as one that is written in Python, no more is used than torch's reducer uses: the future of the work,
// which holds the sum, perhaps in another tensor. Python's wait() may want a timeout, or none.
inline bool is_subclassed(const c10d::ProcessGroup& group) { return typeid(group) != typeid(c10d::ProcessGroup); }

// A collective that has been started.
struct Launched {
  c10::intrusive_ptr<c10d::Work> work;  // null if a comm hook started it; and see [Note: who holds the sum]
  FuturePointer future;
};

// Starts the sum of a tensor over the ranks.
Launched start_all_reduce(c10d::ProcessGroup& group, const at::Tensor& summed);
// The same for a bucket's gradients that are reduced in place, which are divided by it on the way.
Launched start_pieces(PiecewiseBackend& backend, const Bucket& bucket, int divisor);
// As start_all_reduce, for the buffer of a hook's GradBucket.
FuturePointer all_reduce(c10d::ProcessGroup& group, c10d::GradBucket& bucket);

// Blocks until the sum of `summed` is over; returns the tensor that holds it.
at::Tensor finish(const Launched& launched, const at::Tensor& summed);
// The tensor in what the future of an all_reduce of one tensor holds. Throws if there is none.
at::Tensor sum_in(const c10::IValue& value);

}  // namespace ddp_lab
