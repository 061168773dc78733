#include "reduce/device_spans.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "record/recorder.h"

namespace ddp_lab {
namespace {

// More than any training loop has in flight; older ones are given up (a stream that is never reached).
constexpr std::size_t kMostPending = 4096;
constexpr std::size_t kMostSpare = 256;

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

// All living objects: one call at drain time resolves what has completed.
std::mutex& living_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::vector<DeviceSpans*>& living() {
  static auto* spans = new std::vector<DeviceSpans*>;
  return *spans;
}

std::int64_t nanoseconds(double milliseconds) { return static_cast<std::int64_t>(milliseconds * 1e6); }

// What is recorded of a span that began with an event of this kind.
Kind resolved(Kind kind) {
  if (!is_of_group(kind)) return Kind::kDeviceSpan;
  return kind == Kind::kWaitBegin ? Kind::kWaitEnd : Kind::kCollectiveEnded;
}

}  // namespace

std::unique_ptr<DeviceSpans> DeviceSpans::make(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  try {
    return std::make_unique<DeviceSpans>(device);
  } catch (const c10::Error&) {
    return nullptr;  // a device whose events carry no time
  }
}

DeviceSpans::DeviceSpans(c10::Device device) : device_(device) {
  auto first = std::make_shared<Anchor>(device.type());
  first->event.record(current_stream(device));
  first->event.synchronize();
  first->recorded_ns = first->placed_ns = now_ns();
  placed_ = std::move(first);
  const std::lock_guard<std::mutex> lock(living_mutex());
  living().push_back(this);
}

DeviceSpans::~DeviceSpans() {
  resolve();  // nobody can later
  const std::lock_guard<std::mutex> lock(living_mutex());
  living().erase(std::remove(living().begin(), living().end(), this), living().end());
}

void DeviceSpans::resolve_all() {
  const std::lock_guard<std::mutex> lock(living_mutex());
  for (DeviceSpans* spans : living()) spans->resolve();
}

void DeviceSpans::anchor() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!works_ || !recorder().enabled()) return;
  try {
    place_anchors();
  } catch (const c10::Error&) {
    give_up();
    return;
  }
  auto next = std::make_shared<Anchor>(device_.type());
  next->recorded_ns = now_ns();
  next->event.record(current_stream(device_));
  anchors_.push_back(std::move(next));
}

std::shared_ptr<DeviceSpans::Span> DeviceSpans::begin(const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!works_ || !recorder().enabled()) return nullptr;
  std::shared_ptr<Span> span;
  if (spare_.empty()) {
    span = std::make_shared<Span>(device_.type(), event);
  } else {
    span = std::move(spare_.back());
    spare_.pop_back();
    span->event = event;
    span->ended.store(false, std::memory_order_relaxed);
  }
  span->anchor = anchors_.empty() ? placed_ : anchors_.back();
  span->begin.record(current_stream(device_));
  if (spans_.size() == kMostPending) spans_.pop_front();
  spans_.push_back(span);
  return span;
}

void DeviceSpans::end(Span& span) {
  span.end.record(current_stream(span.begin.device()));
  span.ended.store(true, std::memory_order_release);
}

void DeviceSpans::place_anchors() {
  while (!anchors_.empty() && place(*anchors_.front())) {
    placed_ = std::move(anchors_.front());
    anchors_.pop_front();
  }
}

bool DeviceSpans::place(Anchor& anchor) {
  if (!anchor.event.query()) return false;
  const std::int64_t seen = now_ns();
  const std::int64_t placed = placed_->placed_ns + nanoseconds(placed_->event.elapsedTime(anchor.event));
  anchor.placed_ns = std::min(std::max(placed, anchor.recorded_ns), seen);
  return true;
}

void DeviceSpans::resolve() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!works_) return;
  try {
    place_anchors();
    while (!spans_.empty()) {
      Span& span = *spans_.front();
      if (span.abandoned.load(std::memory_order_acquire)) {
        spans_.pop_front();
        continue;
      }
      const bool complete = span.ended.load(std::memory_order_acquire) && span.anchor->placed_ns != 0 &&
                            span.begin.query() && span.end.query();
      if (!complete) break;
      Event event = span.event;
      const std::int64_t base = span.anchor->placed_ns;
      event.kind = resolved(event.kind);
      if (event.kind != Kind::kWaitEnd) event.host_ns = 0;
      event.device_begin_ns = base + nanoseconds(span.anchor->event.elapsedTime(span.begin));
      event.device_end_ns = base + nanoseconds(span.anchor->event.elapsedTime(span.end));
      recorder().record(event);
      if (spare_.size() < kMostSpare && spans_.front().use_count() == 1) spare_.push_back(std::move(spans_.front()));
      spans_.pop_front();
    }
  } catch (const c10::Error&) {
    give_up();
  }
}

// Events of a captured graph can't be asked; the host's events are still recorded.
void DeviceSpans::give_up() {
  works_ = false;
  spans_.clear();
  anchors_.clear();
}

void DeviceSpans::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  spans_.clear();
}

void ModelSpans::add(c10::Device device) {
  const auto same = [&](const auto& known) { return known.first == device; };
  if (std::any_of(all_.begin(), all_.end(), same)) return;
  if (auto made = DeviceSpans::make(device)) all_.emplace_back(device, std::move(made));
}

void ModelSpans::anchor() {
  for (const auto& [device, spans] : all_) spans->anchor();
}

std::shared_ptr<DeviceSpans::Span> ModelSpans::begin(c10::Device device, const Event& event) {
  for (const auto& [known, spans] : all_) {
    if (known == device) return spans->begin(event);
  }
  return nullptr;
}

void ModelSpans::forget() {
  for (const auto& [device, spans] : all_) spans->forget();
}

}  // namespace ddp_lab
