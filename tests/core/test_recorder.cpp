#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "record/recorder.h"

using ddp_lab::Event;
using ddp_lab::Kind;
using ddp_lab::Recorder;

namespace ddp_lab {

// One event, recorded step by step: what a thread does that the system stops in the middle.
struct RecorderSteps {
  RecorderSteps(Recorder& of, Event what) : recorder(of), event(what) {}
  void number() { sequence = recorder.head_.fetch_add(1); }
  bool take() { return (slot = recorder.take(sequence)) != nullptr; }
  void fill() { recorder.fill(*slot, sequence, event, event.host_ns); }

  Recorder& recorder;
  Event event;
  std::uint64_t sequence = 0;
  Recorder::Slot* slot = nullptr;
};

}  // namespace ddp_lab

using ddp_lab::RecorderSteps;

namespace {

// An event of which every field follows from (writer, number), so that a mixture of two can be told.
Event make(int writer, int number) {
  Event event;
  event.host_ns = 1 + number;
  event.device_begin_ns = number * 3 + writer;
  event.device_end_ns = number * 5 + writer;
  event.bytes = number * 7 + writer;
  event.step = number;
  event.reducer = writer;
  event.process_group = number ^ writer;
  event.bucket = number + writer;
  event.parameter = number - writer;
  event.kind = static_cast<Kind>(1 + writer);
  event.generation = static_cast<std::uint16_t>(number);
  return event;
}

bool whole(const Event& event) {
  const Event expected = make(event.reducer, static_cast<int>(event.step));
  return event.host_ns == expected.host_ns && event.device_begin_ns == expected.device_begin_ns &&
         event.device_end_ns == expected.device_end_ns && event.bytes == expected.bytes &&
         event.process_group == expected.process_group && event.bucket == expected.bucket &&
         event.parameter == expected.parameter && event.kind == expected.kind &&
         event.generation == expected.generation;
}

// Takes what a reader sees and checks what holds for every reader at any time.
class Reader {
 public:
  Reader(Recorder& recorder, int writers) : recorder_(recorder), last_number_(writers, -1), threads_(writers, -1) {}

  void drain() {
    const Recorder::Batch batch = recorder_.drain(cursor_);
    std::uint64_t sequence = cursor_ + batch.dropped;
    for (const Event& event : batch.events) {
      CHECK(event.sequence == sequence++);
      CHECK(whole(event));
      CHECK(event.step > last_number_[event.reducer]);  // a writer's own order is kept
      CHECK(threads_[event.reducer] < 0 || threads_[event.reducer] == event.thread);
      last_number_[event.reducer] = event.step;
      threads_[event.reducer] = event.thread;
    }
    CHECK(batch.next == sequence);
    cursor_ = batch.next;
    taken_ += batch.events.size();
    dropped_ += batch.dropped;
  }

  std::uint64_t cursor() const { return cursor_; }
  std::uint64_t taken() const { return taken_; }
  std::uint64_t dropped() const { return dropped_; }

 private:
  Recorder& recorder_;
  std::vector<std::int64_t> last_number_;
  std::vector<std::int64_t> threads_;
  std::uint64_t cursor_ = 0;
  std::uint64_t taken_ = 0;
  std::uint64_t dropped_ = 0;
};

// `writers` threads record `events` each while this thread drains; returns after the last event has been
// drained.
void record_and_drain(Recorder& recorder, Reader& reader, int writers, int events) {
  std::atomic<int> running{writers};
  std::latch together(writers);
  std::vector<std::jthread> threads;
  for (int writer = 0; writer < writers; ++writer) {
    threads.emplace_back([&recorder, &running, &together, writer, events] {
      together.arrive_and_wait();
      for (int number = 0; number < events; ++number) recorder.record(make(writer, number));
      running.fetch_sub(1);
    });
  }
  while (running.load() > 0) reader.drain();
  threads.clear();
  const std::uint64_t total = static_cast<std::uint64_t>(writers) * events;
  for (std::uint64_t before = total; before != reader.cursor();) {  // one round for each gap
    before = reader.cursor();
    reader.drain();
  }
  CHECK(reader.cursor() == total);
  CHECK(reader.taken() + reader.dropped() == total);
}

}  // namespace

TEST("an event is drained as it was recorded, with consecutive sequence numbers, time and thread filled in") {
  Recorder recorder(16);
  const std::int64_t before = ddp_lab::now_ns();
  Event event = make(2, 40);
  recorder.record(event);
  event.host_ns = 0;
  recorder.record(event);
  const Recorder::Batch batch = recorder.drain(0);
  CHECK(batch.events.size() == 2 && batch.dropped == 0 && batch.next == 2);
  CHECK(whole(batch.events[0]) && batch.events[0].sequence == 0 && batch.events[1].sequence == 1);
  CHECK(batch.events[1].host_ns >= before && batch.events[1].host_ns <= ddp_lab::now_ns());
  CHECK(batch.events[0].thread == batch.events[1].thread);
}

TEST("the capacity is rounded up to a power of two") {
  CHECK(Recorder(0).statistics().capacity == 1);
  CHECK(Recorder(1).statistics().capacity == 1);
  CHECK(Recorder(9).statistics().capacity == 16);
  CHECK(Recorder(16).statistics().capacity == 16);
}

TEST("the ring keeps the newest events and counts exactly those it overwrote") {
  Recorder recorder(8);
  for (int number = 0; number < 20; ++number) recorder.record(make(0, number));
  CHECK(recorder.statistics().recorded == 20 && recorder.statistics().dropped == 12);
  const Recorder::Batch batch = recorder.drain(0);
  CHECK(batch.events.size() == 8 && batch.events[0].step == 12 && batch.dropped == 12 && batch.next == 20);
  CHECK(recorder.statistics().dropped == 12);
}

TEST("a reader continues at its cursor, and a second reader changes nothing for it") {
  Recorder recorder(8);
  recorder.record(make(0, 0));
  CHECK(recorder.drain(0).next == 1);
  recorder.record(make(0, 1));
  CHECK(recorder.drain(0).events.size() == 2);
  const Recorder::Batch batch = recorder.drain(1);
  CHECK(batch.events.size() == 1 && batch.events[0].step == 1 && batch.next == 2);
  CHECK(recorder.drain(2).events.empty());
}

TEST("events that some reader drained in time do not count as dropped in the statistics") {
  Recorder recorder(4);
  std::uint64_t cursor = 0;
  for (int number = 0; number < 12; ++number) {
    recorder.record(make(0, number));
    if (number % 4 == 3) cursor = recorder.drain(cursor).next;
  }
  CHECK(recorder.drain(0).dropped == 8);  // a late reader misses them
  CHECK(recorder.statistics().dropped == 0);
  for (int number = 12; number < 18; ++number) recorder.record(make(0, number));
  CHECK(recorder.drain(cursor).dropped == 2);
  CHECK(recorder.statistics().dropped == 2);
}

TEST("a cursor beyond the last event is refused") {
  Recorder recorder(4);
  recorder.record(make(0, 0));
  CHECK(check::thrown<std::out_of_range>([&] { recorder.drain(2); }).find("cursor 2") != std::string::npos);
}

TEST("off, nothing is recorded") {
  Recorder recorder(4);
  recorder.enable(false);
  recorder.record(make(0, 0));
  CHECK(!recorder.enabled() && recorder.statistics().recorded == 0 && recorder.drain(0).next == 0);
  recorder.enable(true);
  recorder.record(make(0, 1));
  CHECK(recorder.statistics().recorded == 1);
}

TEST("a reader stops before an event that is still being written, and takes it later") {
  Recorder recorder(8);
  RecorderSteps stalled(recorder, make(1, 0));
  recorder.record(make(0, 0));
  stalled.number();
  recorder.record(make(0, 1));
  CHECK(recorder.drain(0).next == 1);
  CHECK(stalled.take());
  CHECK(recorder.drain(1).next == 1);
  stalled.fill();
  const Recorder::Batch batch = recorder.drain(1);
  CHECK(batch.events.size() == 2 && batch.dropped == 0 && whole(batch.events[0]) && batch.events[0].reducer == 1);
}

TEST("a writer that stalls in its slot for a whole lap costs one event, and mixes none") {
  Recorder recorder(4);
  RecorderSteps stalled(recorder, make(1, 0));
  stalled.number();
  CHECK(stalled.take());
  for (int number = 0; number < 5; ++number) recorder.record(make(0, number));  // number 3 finds the slot taken
  const Recorder::Batch before = recorder.drain(0);
  CHECK(before.dropped == 2 && before.events.size() == 2 && before.next == 4);
  stalled.fill();
  const Recorder::Batch after = recorder.drain(before.next);
  CHECK(after.dropped == 1 && after.events.size() == 1 && whole(after.events[0]) && after.next == 6);
  CHECK(after.events[0].step == 4);
  for (int number = 5; number < 9; ++number) recorder.record(make(0, number));  // the slot is in use again
  CHECK(recorder.drain(after.next).events.size() == 4);
  CHECK(recorder.statistics().dropped == 3);
}

TEST("a writer that stalls before it takes its slot leaves a newer event there alone") {
  Recorder recorder(4);
  RecorderSteps stalled(recorder, make(1, 0));
  stalled.number();
  for (int number = 0; number < 4; ++number) recorder.record(make(0, number));
  CHECK(!stalled.take());
  const Recorder::Batch batch = recorder.drain(0);
  CHECK(batch.dropped == 1 && batch.events.size() == 4 && batch.events[3].step == 3);
}

TEST("with room for all, four threads lose nothing while a reader drains") {
  Recorder recorder(1 << 16);
  Reader reader(recorder, 4);
  record_and_drain(recorder, reader, 4, 10'000);
  CHECK(reader.taken() == 40'000);
  CHECK(recorder.statistics().dropped == 0);
}

TEST("in a ring that overflows all the time, every event is drained whole or counted as dropped") {
  for (const std::size_t capacity : {1, 2, 64}) {
    Recorder recorder(capacity);
    Reader reader(recorder, 4);
    record_and_drain(recorder, reader, 4, 100'000);
    CHECK(recorder.statistics().recorded == 400'000);
    CHECK(recorder.statistics().dropped == reader.dropped());
  }
}

TEST("recording may be switched on and off while threads record") {
  Recorder recorder(1 << 16);
  std::jthread writer([&recorder] {
    for (int number = 0; number < 10'000; ++number) recorder.record(make(0, number));
  });
  for (int i = 0; i < 1'000; ++i) recorder.enable(i % 2 == 0);
  writer.join();
  CHECK(recorder.drain(0).events.size() == recorder.statistics().recorded);
}

TEST("in memory that outlives the process, events continue where they were") {
  Recorder recorder(8);
  for (int number = 0; number < 3; ++number) recorder.record(make(0, number));
  const std::size_t bytes = recorder.memory().bytes;
  const int file = ::memfd_create("recorder", 0);
  CHECK(file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0);
  void* const mapping = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  CHECK(mapping != MAP_FAILED);
  recorder.keep_in(mapping);
  for (int number = 3; number < 5; ++number) recorder.record(make(0, number));
  const Recorder::Batch batch = recorder.drain(0);
  CHECK(batch.events.size() == 5 && std::all_of(batch.events.begin(), batch.events.end(), whole));
  std::uint64_t stamp = 0;
  const std::size_t fifth = 4 * recorder.memory().slot_bytes;
  CHECK(::pread(file, &stamp, sizeof(stamp), static_cast<off_t>(fifth)) == sizeof(stamp) && stamp == 2 * 4 + 2);
  recorder.keep_for_itself();
  recorder.record(make(0, 5));
  CHECK(recorder.drain(5).events.size() == 1 && whole(recorder.drain(5).events[0]));
  CHECK(::pread(file, &stamp, sizeof(stamp), static_cast<off_t>(fifth + recorder.memory().slot_bytes)) ==
        sizeof(stamp));
  CHECK(stamp == 0);
  ::close(file);
}

TEST("measuring the cost leaves the process's recorder alone") {
  const std::uint64_t before = ddp_lab::recorder().statistics().recorded;
  CHECK(ddp_lab::measure_ns_per_event(true, 1) > 0);
  CHECK(ddp_lab::recorder().statistics().recorded == before);
}

int main() { return check::run(); }
