#include "reduce/breakpoints.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace ddp_lab {
namespace {

constexpr std::chrono::milliseconds kCheckEvery(50);

bool contains(const std::vector<std::size_t>& some, std::size_t index) {
  return some.empty() || std::find(some.begin(), some.end(), index) != some.end();
}

}  // namespace

void Breakpoints::set(const Points& points, std::vector<std::size_t> parameters, std::vector<std::size_t> buckets) {
  const std::lock_guard<std::mutex> lock(mutex_);
  points_ = points;
  parameters_ = std::move(parameters);
  buckets_ = std::move(buckets);
  update();
}

bool Breakpoints::wants(Point point, std::size_t index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return chosen(point, index);
}

bool Breakpoints::chosen(Point point, std::size_t index) const {
  const auto at = static_cast<std::size_t>(point);
  if (once_[at]) return true;
  return points_[at] && contains(point == Point::kGradReady ? parameters_ : buckets_, index);
}

void Breakpoints::pause(const Pause& at, const std::function<void()>& check) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return !current_; });
  if (!chosen(at.point, at.index)) return;
  current_ = at;
  once_ = Points{};
  over_ = false;
  ended_.clear();
  update();
  struct Leave {
    Breakpoints& self;
    ~Leave() {  // holds the lock
      self.current_.reset();
      self.update();
      self.changed_.notify_all();
    }
  };
  const Leave leave{*this};
  while (!changed_.wait_for(lock, kCheckEvery, [&] { return over_; })) {
    lock.unlock();
    try {
      check();
    } catch (...) {
      lock.lock();
      throw;
    }
    lock.lock();
  }
  if (!ended_.empty()) throw std::runtime_error(ended_);
}

bool Breakpoints::go_on(const Points& next) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!current_ || over_) return false;
  once_ = next;
  over_ = true;
  update();
  changed_.notify_all();
  return true;
}

void Breakpoints::end(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  points_ = once_ = Points{};
  if (current_ && !over_) ended_ = why;
  over_ = true;
  update();
  changed_.notify_all();
}

std::optional<Breakpoints::Pause> Breakpoints::current() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return over_ ? std::nullopt : current_;
}

void Breakpoints::update() {
  const auto some = [](const Points& points) { return std::find(points.begin(), points.end(), true) != points.end(); };
  any_ = some(points_) || some(once_) || current_.has_value();
}

PauseGate::Lock PauseGate::enter() {
  Lock lock(mutex_);
  while (stopped_) resumed_.wait(lock);
  return lock;
}

void PauseGate::stop(const Breakpoints::Pause& at, bool locked) {
  if (!breakpoints_.wants(at.point, at.index)) return;
  if (!locked) return breakpoints_.pause(at, check_);
  struct Outside {
    PauseGate& self;
    explicit Outside(PauseGate& gate) : self(gate) {
      self.stopped_ = true;
      self.mutex_.unlock();
    }
    ~Outside() {
      self.mutex_.lock();
      self.stopped_ = false;
      self.resumed_.notify_all();
    }
  };
  const Outside outside(*this);
  breakpoints_.pause(at, check_);
}

}  // namespace ddp_lab
