// Breakpoints: points of a backward at which one model pauses on this rank, until somebody lets it go on.
// Breakpoints are guarded by their own mutex.
//
// [Note: pausing a backward]
// A backward pauses on the thread that runs it (autograd's), at four points: a gradient is ready and not yet in its
// bucket; a bucket is ready and not yet launched; its collective has been started; its average is there and not yet
// written back. Without breakpoints that costs one load of a flag at each of them.
//
// A pause may last as long as the user thinks, and must not stop anything else. The thread waits without the GIL and
// without the reducer's mutex, so that other threads can ask where the backward stands (Reducer::stage). It holds the
// place of the backward all the same: gradients that another thread of autograd brings meanwhile wait at the door
// (PauseGate::enter), or they could launch a later bucket before the one that is about to be launched.
// It ends in one of four ways: `go_on`; `end`, when this rank is to stop (interrupt, freed, given up): the backward
// then fails with an exception; a signal: what `check` throws; the breakpoints are taken away (`clear`). The other
// ranks wait in their collectives meanwhile, whose timeouts are raised for that: see
// ddp_lab/parallel/live/breakpoints.py.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace ddp_lab {

enum class Point : std::uint8_t { kGradReady, kBucketReady, kLaunched, kReduced };
inline constexpr std::size_t kPoints = 4;

class Breakpoints {
 public:
  using Points = std::array<bool, kPoints>;

  struct Pause {
    Point point = Point::kGradReady;
    std::size_t index = 0;  // of the parameter (kGradReady) or of the bucket
    std::int64_t step = 0;
    std::int64_t since_ns = 0;
  };

  // Whether there is anything to pause for. Any thread, no lock.
  bool any() const noexcept { return any_.load(std::memory_order_relaxed); }

  // Pauses at these points from now on, at gradients of `parameters` and at `buckets` alone (empty: all of them).
  void set(const Points& points, std::vector<std::size_t> parameters, std::vector<std::size_t> buckets);
  // No more pauses; one under way ends, and the backward goes on.
  void clear() { end(""); }
  bool wants(Point point, std::size_t index) const;
  // Blocks until the pause is over. `check` is called now and then, and may throw. Throws std::runtime_error after
  // end().
  void pause(const Pause& at, const std::function<void()>& check);
  // Ends the pause that is under way. It pauses next where it was set to, or once at one of `next`, whatever comes
  // first. False if there is none.
  bool go_on(const Points& next);
  // Takes the breakpoints away; a pause that is under way throws.
  void end(const std::string& why);

  std::optional<Pause> current() const;

 private:
  bool chosen(Point point, std::size_t index) const;
  void update();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> any_{false};
  Points points_{};
  Points once_{};
  std::vector<std::size_t> parameters_;
  std::vector<std::size_t> buckets_;
  std::optional<Pause> current_;
  bool over_ = false;
  std::string ended_;  // why; empty: not
};

// Where the threads of a backward pause, wait for one that pauses, or lose a gradient.
// Guarded by the reducer's mutex, but for the breakpoints, which have their own.
class PauseGate {
 public:
  using Mutex = std::recursive_mutex;  // a comm hook may ask the model about its buckets
  using Lock = std::unique_lock<Mutex>;

  explicit PauseGate(Mutex& mutex) : mutex_(mutex) {}

  Breakpoints& breakpoints() noexcept { return breakpoints_; }
  std::optional<Breakpoints::Pause> current() const { return breakpoints_.current(); }
  void set_check(std::function<void()> check) { check_ = std::move(check); }

  // The mutex, once no other thread pauses in the middle of a backward.
  Lock enter();
  // Pauses if it is wanted there. `locked`: the caller holds the mutex, once.
  void stop(const Breakpoints::Pause& at, bool locked);

  void drop_next(std::size_t parameter) { dropped_ = parameter; }
  // True once: the gradient that has arrived is not to be heard of.
  bool drops(std::size_t parameter) {
    if (dropped_ != parameter) return false;
    dropped_.reset();
    return true;
  }

 private:
  Mutex& mutex_;
  Breakpoints breakpoints_;
  std::function<void()> check_ = [] {};
  std::condition_variable_any resumed_;
  std::optional<std::size_t> dropped_;
  bool stopped_ = false;  // a thread pauses, and holds the place of the backward without the mutex
};

}  // namespace ddp_lab
