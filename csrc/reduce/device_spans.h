// When a device really ran each bucket's collective: pairs of events, placed on the host's time axis.
// DeviceSpans are guarded by their own mutex.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "record/event.h"

namespace ddp_lab {

// [Note: device time on the host's axis]
// Events of a device tell only differences. One anchor is placed exactly, when the reducer is made: recorded,
// then waited for. Each later anchor (one an arm) is placed by its distance from the one before, so that the
// few bits of a single elapsed time never span more than one step. The two clocks drift apart by some parts
// in a million; what we know for certain corrects it: an event can't have run before it was recorded, nor
// after it was seen to be complete. Nothing waits for the device during training.
//
// [Note: what a span costs the host]
// A step of a small model takes the host of a fast GPU longer than the GPU. So the training thread makes no events
// (those of resolved spans serve again) and asks for none but one anchor's a step; spans are resolved by who drains
// the recorder. Nothing is measured while nothing is recorded.
class DeviceSpans {
 public:
  struct Anchor {
    explicit Anchor(c10::DeviceType type) : event(type, c10::EventFlag::BACKEND_DEFAULT) {}
    c10::Event event;
    std::int64_t recorded_ns = 0;
    std::int64_t placed_ns = 0;  // 0: not yet
  };
  struct Span {
    Span(c10::DeviceType type, const Event& what)
        : begin(type, c10::EventFlag::BACKEND_DEFAULT), end(type, c10::EventFlag::BACKEND_DEFAULT), event(what) {}
    c10::Event begin;
    c10::Event end;
    Event event;  // what is recorded once both are placed
    std::shared_ptr<Anchor> anchor;
    std::atomic<bool> ended{false};
    std::atomic<bool> abandoned{false};
  };

  // Null for the CPU. Waits for the device once.
  static std::unique_ptr<DeviceSpans> make(c10::Device device);
  // resolve() of every living object: for the thread that drains the recorder.
  static void resolve_all();

  explicit DeviceSpans(c10::Device device);
  ~DeviceSpans();
  DeviceSpans(const DeviceSpans&) = delete;
  DeviceSpans& operator=(const DeviceSpans&) = delete;

  // At arm: a new anchor on the device's current stream.
  void anchor();
  // At launch, on the current stream; null while nothing is recorded. `end` on the stream that is current in the
  // future's callback.
  std::shared_ptr<Span> begin(const Event& event);
  static void end(Span& span);
  // It will have no end, and nothing is recorded of it.
  static void abandon(Span& span) { span.abandoned.store(true, std::memory_order_release); }
  // Records kDeviceSpan (of a group's operation: kCollectiveEnded; of a wait for it: kWaitEnd) for every span that the
  // device has completed. Never waits. Any thread.
  void resolve();
  // Spans of a backward that was abandoned never end.
  void forget();

 private:
  bool place(Anchor& anchor);
  void place_anchors();
  void give_up();

  std::mutex mutex_;
  const c10::Device device_;
  std::shared_ptr<Anchor> placed_;  // the newest that has been placed
  std::deque<std::shared_ptr<Anchor>> anchors_;
  std::deque<std::shared_ptr<Span>> spans_;
  std::vector<std::shared_ptr<Span>> spare_;  // resolved ones
  bool works_ = true;
};

// Those of all devices of a model. Guarded by its owner's mutex.
class ModelSpans {
 public:
  // Nothing for the CPU. Waits for a device that is new.
  void add(c10::Device device);
  // A backward is to come.
  void anchor();
  // Null for the CPU.
  std::shared_ptr<DeviceSpans::Span> begin(c10::Device device, const Event& event);
  void forget();

 private:
  std::vector<std::pair<c10::Device, std::unique_ptr<DeviceSpans>>> all_;
};

}  // namespace ddp_lab
