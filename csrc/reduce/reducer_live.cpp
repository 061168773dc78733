// Reducer: what happens while training runs: pauses, dropped gradients.
#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {

void Reducer::stop(Point point, std::size_t index, bool locked) {
  const std::uint64_t arm = arm_;
  gate_.stop({point, index, origin_.step, now_ns()}, locked);
  TORCH_CHECK(arm == arm_, messages::given_up(where_last()));
}

void Reducer::set_pause_check(std::function<void()> check) {
  const Lock lock(mutex_);
  gate_.set_check(std::move(check));
}

Reducer::Stage Reducer::stage() const {
  const Lock lock(mutex_);
  Stage made{origin_.step, origin_.generation, in_flight_, finalizing_, {}, {}, gate_.current()};
  for (const auto& bucket : buckets_) {
    const BucketTimes& times = *bucket->times;
    made.buckets.push_back({backward_begin_, times.first_ready, times.ready, times.launched, times.reduced, 0});
  }
  if (in_flight_) made.missing = schedule_.missing();
  return made;
}

void Reducer::drop_next(std::size_t parameter) {
  const Lock lock(mutex_);
  TORCH_CHECK(parameter < parameters_.size(), "there is no parameter ", parameter);
  gate_.drop_next(parameter);
}

std::int64_t Reducer::finished() const {
  const Lock lock(mutex_);
  return finished_;
}

void Reducer::set_finished(std::int64_t finished) {
  const Lock lock(mutex_);
  finished_ = finished;
}

}  // namespace ddp_lab
