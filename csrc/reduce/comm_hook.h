// How the gradients of a bucket are averaged over the ranks: all_reduce, or a comm hook of torch's interface.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "reduce/bucket.h"

namespace ddp_lab {

// The group is released without the GIL: see [Note: who destroys the process group] in bindings.cpp.
using GroupPointer = std::shared_ptr<c10d::ProcessGroup>;
using HookPointer = std::unique_ptr<c10d::CommHookInterface>;
using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

// A collective that has been started.
struct Launched {
  c10::intrusive_ptr<c10d::Work> work;  // null if a comm hook started it
  FuturePointer future;
};

// Starts the sum of the bucket's buffer over the ranks, in place. Gradients must have been divided already.
Launched start_all_reduce(c10d::ProcessGroup& group, const Bucket& bucket);

// Runs the comm hook, which averages; torch's own hooks run unchanged, as they see torch's GradBucket.
Launched start_hook(c10d::CommHookInterface& hook, const Bucket& bucket, std::size_t index, std::size_t count);

// Blocks until the collective is over; returns the tensor that holds the averaged gradients. Throws what it
// failed with, or std::runtime_error if the hook's result does not fit. `hook` is null for the all_reduce.
at::Tensor wait_for(const Launched& launched, c10d::CommHookInterface* hook, const Bucket& bucket, std::size_t index);

}  // namespace ddp_lab
