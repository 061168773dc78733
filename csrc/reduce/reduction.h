// Reduction: over which group gradients are averaged, in which way, and what they are divided by.
// Guarded by Reducer's mutex; while a backward is finalized, what waits belongs to the thread that does it.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "reduce/bucket.h"
#include "reduce/comm_hook.h"

namespace ddp_lab {

class Reduction {
 public:
  explicit Reduction(GroupPointer group);

  const GroupPointer& group() const noexcept { return group_; }
  // Afterwards `group` is the old one.
  void swap_group(GroupPointer& group);
  CommHook* hook() const noexcept { return hook_.get(); }
  void swap_hook(HookPointer& hook) noexcept { hook_.swap(hook); }
  bool sums_pieces() const noexcept { return piecewise_ != nullptr; }
  // What makes buffers for CPU parameters: see [Note: buffers in the backend's memory]. Null: ordinary memory.
  MakeBuffer cpu_memory() const;

  // `work` sums ones over the ranks that still have inputs; its result divides the gradients of the next backward.
  // Null: the world size does.
  void set_remaining_ranks(c10::intrusive_ptr<c10d::Work> work) { remaining_ranks_ = std::move(work); }
  // Waited for at the end of the next backward.
  void set_futures(std::vector<FuturePointer> futures) { futures_ = std::move(futures); }
  void wait_for_futures() const;

  // A backward begins, with a divisor of its own.
  void begin() noexcept { divisor_ = 0; }
  int divisor();
  // Starts the collective of bucket `index` of `count`. Without a hook gradients must have been divided already, but
  // for those that are reduced in place; a hook averages itself.
  Launched start(const Bucket& bucket, std::size_t index, std::size_t count);
  // Blocks until it is over; returns the tensor that holds the averaged gradients, of the bucket's dtype. Throws what
  // it failed with, or c10::Error if the result does not fit: it names the hook, the bucket and its parameters.
  at::Tensor wait(const Launched& launched, const Bucket& bucket, std::size_t index) const;
  // A backward is over, or given up: nothing is left to wait for.
  void end() {
    futures_.clear();
    remaining_ranks_.reset();
  }

 private:
  Launched start_watched_pieces(const Bucket& bucket);

  GroupPointer group_;
  PiecewiseBackend* piecewise_ = nullptr;  // the group's, if it is one
  HookPointer hook_;
  c10::intrusive_ptr<c10d::Work> remaining_ranks_;
  std::vector<FuturePointer> futures_;
  int divisor_ = 0;  // 0: not yet known
};

}  // namespace ddp_lab
