// Reducer: what happens while training runs: pauses, dropped gradients.
#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {

// See [Note: pausing a backward]. `locked`: the caller holds the mutex, once.
void Reducer::stop(Point point, std::size_t index, bool locked) {
  if (!breakpoints_.wants(point, index)) return;
  struct Outside {
    Reducer& self;
    const bool locked;
    Outside(Reducer& reducer, bool is_locked) : self(reducer), locked(is_locked) {
      if (!locked) return;
      self.stopped_ = true;
      self.mutex_.unlock();
    }
    ~Outside() {
      if (!locked) return;
      self.mutex_.lock();
      self.stopped_ = false;
      self.resumed_.notify_all();
    }
  };
  const std::uint64_t arm = arm_;
  const Breakpoints::Pause at{point, index, step_, now_ns()};
  {
    const Outside outside(*this, locked);
    breakpoints_.pause(at, pause_check_);
  }
  TORCH_CHECK(arm == arm_, messages::given_up({step_ - 1, group_->getRank(), options_.module}));
}

// The mutex, once no other thread pauses in the middle of a backward.
Reducer::Lock Reducer::enter() {
  Lock lock(mutex_);
  while (stopped_) resumed_.wait(lock);
  return lock;
}

void Reducer::set_pause_check(std::function<void()> check) {
  const Lock lock(mutex_);
  pause_check_ = std::move(check);
}

Reducer::Stage Reducer::stage() const {
  const Lock lock(mutex_);
  Stage made{step_, generation_, in_flight_, finalizing_, {}, {}, breakpoints_.current()};
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
  dropped_ = static_cast<std::int64_t>(parameter);
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
