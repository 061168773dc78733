// Recorder: a bounded ring of events that any thread writes and readers drain by cursor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "record/event.h"

namespace ddp_lab {

// Whose events they are and in which step, the same for all of a model until that changes. Guarded by its owner's
// mutex.
struct EventOrigin {
  std::int32_t reducer = -1;        // the same on all ranks
  std::int32_t process_group = -1;  // of this rank
  std::uint16_t generation = 0;     // of the buckets
  std::int64_t step = 0;            // the coming (or running) synchronised backward

  Event event(Kind kind, std::int64_t host_ns = 0) const {
    Event made;
    made.kind = kind;
    made.host_ns = host_ns;
    made.reducer = reducer;
    made.process_group = process_group;
    made.generation = generation;
    made.step = step;
    return made;
  }
};

class Recorder {
 public:
  // What a reader got: events with consecutive sequence numbers that end just before `next`.
  // `dropped` were overwritten between the reader's cursor and the first of them (`next` if there are none).
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
  ~Recorder();

  // Writes one event and fills in sequence, thread and (if 0) host_ns. Any thread; never waits, never
  // allocates. Off, it is one branch.
  void record(const Event& event) noexcept {
    if (enabled()) write(event);
  }

  // Events from `cursor` on that are completely written. Never blocks a writer. Stops at a gap (the writers
  // lapped this call): the next call reports and skips it, so "everything" is had when a call returns neither
  // events nor drops. Throws std::out_of_range if `cursor` is beyond the last event.
  Batch drain(std::uint64_t cursor);

  void enable(bool on) noexcept { enabled_.store(on, std::memory_order_relaxed); }
  bool enabled() const noexcept { return enabled_.load(std::memory_order_relaxed); }
  Statistics statistics() const;

  // The slots as they lie in memory, in pages of their own: see [Note: what a dead rank leaves].
  struct Memory {
    std::size_t slots = 0;
    std::size_t slot_bytes = 0;
    std::size_t bytes = 0;  // whole pages
  };
  Memory memory() const noexcept;
  // Moves the slots into this mapping of as many bytes, which takes their place in memory. While nobody records.
  void keep_in(void* mapping);
  // In a forked child: the slots are its own from now on, as they are.
  void keep_for_itself() noexcept;

 private:
  struct Slot;
  enum class Found { kDone, kNotYet, kGone };

  friend struct RecorderSteps;  // tests stop a writer between two steps

  void write(const Event& event) noexcept;
  Slot* take(std::uint64_t sequence) noexcept;  // null: this event is lost
  void fill(Slot& slot, std::uint64_t sequence, const Event& event, std::int64_t host_ns) noexcept;
  Found read(std::uint64_t sequence, Event& event) const noexcept;
  std::uint64_t oldest() const noexcept;

  std::size_t written_bytes() const noexcept;

  const std::size_t mask_;
  Slot* const slots_;
  std::atomic<bool> enabled_{true};  // relaxed: a switch, which publishes nothing
  // Sequence number of the next event. Relaxed: gives numbers out, and publishes nothing; see Slot::stamp. Each in a
  // cache line of its own, which has 128 bytes on some aarch64.
  alignas(128) std::atomic<std::uint64_t> head_{0};
  alignas(128) mutable std::mutex readers_;  // guards what follows; writers never take it
  std::uint64_t drained_ = 0;                // the furthest reader's cursor
  std::uint64_t dropped_ = 0;                // lost among the events before drained_
};

// The process's recorder: every reducer of a rank writes to it. Never destroyed (autograd and backend threads
// may record until the very end of the process).
Recorder& recorder();

// CLOCK_MONOTONIC in nanoseconds.
std::int64_t now_ns() noexcept;

// What recording costs, measured where it runs: median over rounds of the nanoseconds of one Recorder::record() from
// one thread, clock included. Takes a few milliseconds and a recorder of its own: the process's events stay as they
// are.
double measure_ns_per_event(bool enabled, int rounds = 9);

}  // namespace ddp_lab
