// Phase: where a synchronised backward stands. Guarded by its owner's mutex. Standard library only.
#pragma once

#include <cstdint>

namespace ddp_lab {

class Phase {
 public:
  // A forward, or an output's gradient, announces a backward.
  void arm() noexcept { state_ = State::kArmed; }
  // A gradient has arrived: from now on it can't be taken back.
  void run() noexcept {
    if (state_ == State::kArmed) state_ = State::kRunning;
  }
  // It is over but for finalize_backward(): see [Note: a backward that the caller ends].
  void await_caller() noexcept { state_ = State::kAwaitingCaller; }
  // A thread waits for the buckets.
  void finalize() noexcept { state_ = awaits_caller() ? State::kFinalizingForCaller : State::kFinalizing; }
  void end() noexcept { state_ = State::kIdle; }

  bool armed() const noexcept { return state_ != State::kIdle; }
  bool in_flight() const noexcept { return state_ >= State::kRunning; }
  bool finalizing() const noexcept { return state_ >= State::kFinalizing; }
  bool awaits_caller() const noexcept {
    return state_ == State::kAwaitingCaller || state_ == State::kFinalizingForCaller;
  }

 private:
  // In this order: each is also what those before it say.
  enum class State : std::uint8_t { kIdle, kArmed, kRunning, kAwaitingCaller, kFinalizing, kFinalizingForCaller };

  State state_ = State::kIdle;
};

}  // namespace ddp_lab
