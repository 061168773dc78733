// Reducer: backwards that the caller ends.
#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {

// [Note: a backward that the caller ends]
// With `require_manual_backward_finalization` the end of a synchronised backward neither waits for the collectives nor
// writes averages back (`await_end`): until the caller's finalize_backward() the collectives go on beside whatever the
// caller does, and gradients are what autograd left, or, as bucket views, anything. `end_manually` does then what the
// end of the backward does otherwise. It may also run inside the backward, in a hook, as soon as all buckets are
// launched; the graph tasks of the backward that have not ended are forgotten, since what they bring later belongs to
// no synchronised backward.
// Meanwhile the reducer is in flight: nothing else may begin. A forward, another backward or a change of the model is
// refused, and leaves the averages to be fetched. Backwards without autograd (join, sync_gradients) end by themselves.
void Reducer::require_manual_end(bool required) {
  const Lock lock(mutex_);
  TORCH_CHECK(
      manual_ == required || !(armed_ || in_flight_),
      "require_manual_backward_finalization cannot be set after forward while a backward pass is expected or in "
      "progress. Set it before the forward, or after finalize_backward().");
  manual_ = required;
}

// Not known before the end of the backward: whether all gradients have arrived, or in which order they will from now
// on.
bool Reducer::ends_after_backward() const {
  const Lock lock(mutex_);
  if (!manual_) return false;
  return mode_ == Mode::kWhole || (use_.searches() ? !use_.searched() : !buckets_.rebuilt);
}

void Reducer::await_end() {
  awaiting_ = true;
  now_times_.backward_compute_end = now_ns();
}

void Reducer::end_manually() {
  Lock lock(mutex_);
  if (!manual_) fail(messages::not_manual());
  if (given_up_ != 0 && given_up_ + 1 == arm_) fail(messages::given_up(where_last()));
  if (!in_flight_ || finalizing_) fail(messages::nothing_to_end(where()));
  if (!schedule_.all_launched()) fail(messages::ended_early(where(), options_.names, schedule_.missing()));
  tasks_.clear();
  finalize(lock);
}

void Reducer::check_ended() const {
  const Lock lock(mutex_);
  TORCH_CHECK(!awaiting_, messages::not_ended(where()));
}

}  // namespace ddp_lab
