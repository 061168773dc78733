// Reducer: backwards that no gradient brings.
#include <ATen/core/grad_mode.h>

#include <numeric>

#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {

// [Note: join]
// Ranks that have run out of inputs go on taking part in the collectives of the others, or these would wait for ever.
// For a backward that means: the same buckets through the same hook or all_reduce, in the same order, filled with
// zeros, and the sum over used parameters if the others make it. The averages that come back are for the others; the
// own gradients stay as the last own backward left them. The divisor is the number of ranks that still have inputs,
// which the forward sums up asynchronously and the first gradient waits for, or the world size, as the user chose.
void Reducer::shadow_backward() {
  Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "a rank that has joined can't have a backward of its own under way");
  const at::NoGradGuard no_grad;
  const BucketSet::Zeros zeros(buckets_);
  struct Shadow {
    bool& flag;
    ~Shadow() { flag = false; }
  };
  shadow_ = true;
  const Shadow shadow{shadow_};
  start_backward(false);
  in_flight_ = true;
  begin_backward(now_ns());
  for (std::size_t parameter = 0; parameter < parameters_.size(); ++parameter) mark_ready(parameter);
  finalize(lock);
}

void Reducer::synchronize() {
  Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "gradients can't be synchronised during a backward");
  start_backward(true);
  in_flight_ = true;
  begin_backward(now_ns());
  for (std::size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (parameters_[parameter].grad().defined()) use_.here.mark(parameter);
  }
  flush();
  finalize(lock);
}

void Reducer::mark_all_ready() {
  const Lock lock(mutex_);
  if (buckets_.rebuilt || last_.ready() != 0) return;
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  last_.set_order(std::move(order));
}

void Reducer::set_forward_pass_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial_world_size) {
  const Lock lock(mutex_);
  reduction_.set_remaining_ranks(divide_by_initial_world_size ? nullptr : std::move(work));
  joined_iteration_ = iteration_ + 1;
}

}  // namespace ddp_lab
