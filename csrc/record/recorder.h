// Recorder: a bounded ring of events that any thread writes and one reader drains by cursor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "record/event.h"

namespace ddp_lab {

class Recorder {
 public:
  // What a reader got: events with consecutive sequence numbers that end just before `next`.
  // `dropped` were overwritten between the reader's cursor and the first of them.
  struct Batch {
    std::vector<Event> events;
    std::uint64_t dropped = 0;
    std::uint64_t next = 0;
  };

  struct Statistics {
    std::uint64_t recorded = 0;  // since the process started
    std::uint64_t dropped = 0;   // overwritten before the furthest reader drained them
    std::uint64_t capacity = 0;
    bool enabled = false;
  };

  // `capacity` is rounded up to a power of two.
  explicit Recorder(std::size_t capacity = 1 << 16);

  // Writes one event and fills in sequence, thread and (if 0) host_ns. Any thread, wait-free, no allocation.
  // Off, it is one branch.
  void record(Event event) noexcept;

  // Events from `cursor` on that are completely written. Never blocks a writer.
  Batch drain(std::uint64_t cursor);

  void enable(bool on) noexcept;
  bool enabled() const noexcept { return enabled_.load(std::memory_order_relaxed); }
  Statistics statistics() const noexcept;

 private:
  struct Slot;
  std::size_t mask_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<std::uint64_t> head_{0};
  std::atomic<std::uint64_t> drained_{0};
  std::atomic<std::uint64_t> dropped_{0};
  std::atomic<bool> enabled_{true};
};

// The process's recorder: every reducer of a rank writes to it. Never destroyed (autograd and backend threads
// may record until the very end of the process).
Recorder& recorder();

// CLOCK_MONOTONIC in nanoseconds.
std::int64_t now_ns() noexcept;

}  // namespace ddp_lab
