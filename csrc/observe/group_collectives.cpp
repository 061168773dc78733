#include "observe/group_collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "comm/collective_interception.h"
#include "record/black_box.h"
#include "record/json.h"
#include "record/recorder.h"

namespace ddp_lab {
namespace {

constexpr std::int64_t kAnchorEveryNs = 50'000'000;

// ---- the groups of this process

// "" for a group without backends: one that is written in Python has no name.
std::string name_of(const c10d::ProcessGroup& group) {
  try {
    return group.getGroupName();
  } catch (const c10::Error&) {
    return "";
  }
}

// A description without the group's ranks, which only Python knows.
std::string text_of(const NamedGroup& group) {
  Json made;
  made.add("type", "group");
  made.add("index", group.index);
  made.add("name", group.name);
  made.add("description", group.description);
  made.add("backend", group.backend);
  made.add("size", group.size);
  return made.text();
}

class Groups {
 public:
  static Groups& of_process() {
    static auto* const kept = new Groups;  // other threads may outlive statics
    return *kept;
  }

  std::int32_t index(const c10d::ProcessGroup& group) {
    return with(group, [](const Group& known) { return known.index; });
  }

  // The group's number, and the operation's number in it.
  std::pair<std::int32_t, std::int64_t> enter(const c10d::ProcessGroup& group, bool sends, bool receives, int peer) {
    return with(group, [&](Group& known) -> std::pair<std::int32_t, std::int64_t> {
      if (!sends && !receives) return {known.index, known.collectives++};
      return {known.index, known.between[{peer, sends}]++};
    });
  }

  void forget(std::int32_t index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found =
        std::find_if(groups_.begin(), groups_.end(), [&](const auto& one) { return one.second.index == index; });
    if (found != groups_.end()) groups_.erase(found);
  }

  std::vector<NamedGroup> take_new() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(new_, {});
  }

 private:
  struct Group {
    std::int32_t index = 0;
    std::string name{};
    std::int64_t collectives = 0;
    std::map<std::pair<int, bool>, std::int64_t> between{};  // (peer, whether it is sent to) -> operations
  };

  // Calls `use` under the lock with what is known of the group. What the group says of itself is asked for without the
  // lock: a group that is written in Python wants the GIL, and whoever has the GIL may want the lock.
  template <typename Use>
  std::invoke_result_t<Use, Group&> with(const c10d::ProcessGroup& group, const Use& use) {
    const std::string name = name_of(group);
    std::optional<NamedGroup> described;
    for (;;) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = groups_.find(&group);
        if (found != groups_.end() && found->second.name == name) return use(found->second);
        if (described) return use(add(group, *std::move(described)));
      }
      described = NamedGroup{0, name, group.getGroupDesc(), group.getBackendName(), group.getSize()};
    }
  }

  Group& add(const c10d::ProcessGroup& group, NamedGroup described) {
    Group& made = groups_[&group];
    made = Group{next_++, described.name};
    described.index = made.index;
    leave(text_of(described));
    constexpr std::size_t kMostNew = 4096;  // where nobody takes them
    if (new_.size() == kMostNew) new_.clear();
    new_.push_back(std::move(described));
    return made;
  }

  std::mutex mutex_;
  std::unordered_map<const c10d::ProcessGroup*, Group> groups_;
  std::vector<NamedGroup> new_;
  std::int32_t next_ = 0;
};

// ---- when devices run them

// One for each device; null for the CPU, and where it has no times.
DeviceSpans* spans_of(c10::Device device) {
  struct OfDevice {
    std::unique_ptr<DeviceSpans> spans;
    std::int64_t anchored_ns = 0;
  };
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<std::pair<int, int>, OfDevice>;
  if (device.is_cpu()) return nullptr;
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto [found, is_new] = all->try_emplace({static_cast<int>(device.type()), static_cast<int>(device.index())});
  OfDevice& one = found->second;
  if (is_new) one.spans = DeviceSpans::make(device);
  if (one.spans && now_ns() - one.anchored_ns > kAnchorEveryNs) {
    one.spans->anchor();
    one.anchored_ns = now_ns();
  }
  return one.spans.get();
}

// ---- one operation

std::atomic<FindCall> find_call_of{nullptr};

class Recorded final : public Watch {
 public:
  Recorded(const Event& entered, std::shared_ptr<DeviceSpans::Span> span) : event_(entered), span_(std::move(span)) {}

  bool on_device() const override { return span_ != nullptr; }

  void ended(bool failed) override {
    if (ended_.exchange(true)) return;
    if (failed) {
      give_up(Kind::kCollectiveFailed);
    } else if (span_) {
      DeviceSpans::end(*span_);  // recorded when the device has come so far
    } else {
      note(Kind::kCollectiveEnded);
    }
  }

  void ends_unseen() override { give_up(Kind::kEndUnseen); }
  void wait_begins() override { note(Kind::kWaitBegin); }
  void wait_ends() override { note(Kind::kWaitEnd); }

 private:
  void give_up(Kind kind) const {
    if (span_) DeviceSpans::abandon(*span_);  // spans are resolved in turn: it would keep back those behind it
    note(kind);
  }

  void note(Kind kind) const {
    Event event = event_;
    event.kind = kind;
    event.host_ns = 0;
    recorder().record(event);
  }

  const Event event_;
  const std::shared_ptr<DeviceSpans::Span> span_;
  std::atomic<bool> ended_{false};
};

thread_local std::vector<std::shared_ptr<DeviceCollective>> entered_here;

void keep(std::shared_ptr<DeviceCollective> one) {
  constexpr std::size_t kMostKept = 64;  // where nobody takes them
  if (entered_here.size() == kMostKept) entered_here.clear();
  entered_here.push_back(std::move(one));
}

std::shared_ptr<Watch> see(CollectiveCall& call) {
  const bool sends = std::strcmp(call.operation, "send") == 0;
  const bool receives = std::strncmp(call.operation, "recv", 4) == 0;
  const auto [group, number] = Groups::of_process().enter(call.group, sends, receives, call.peer);
  if (!recorder().enabled()) return nullptr;
  Event event;
  event.kind = Kind::kCollectiveEntered;
  event.host_ns = now_ns();
  event.process_group = group;
  event.step = number;
  event.bucket = call.peer;
  event.bytes = std::max<std::int64_t>(call.bytes(), 0);
  const int dtype = call.first.defined() ? static_cast<int>(call.first.scalar_type()) : -1;
  event.parameter = find_call_of.load()(
      {call.operation, dtype, call.reduction, call.purpose.reducer, call.purpose.bucket, call.purpose.use});
  recorder().record(event);
  DeviceSpans* const spans = call.first.defined() ? spans_of(call.first.device()) : nullptr;
  if (spans == nullptr) return std::make_shared<Recorded>(event, nullptr);
  if (call.purpose.use != Use::kNotSaid && call.purpose.use != Use::kBuffers)
    keep(std::make_shared<DeviceCollective>(event, call.first.device()));
  return std::make_shared<Recorded>(event, spans->begin(event));
}

}  // namespace

void record_group_collectives(FindCall find_call) {
  find_call_of = find_call;
  set_watcher(Role::kRecords, &see);
}

void DeviceCollective::wait_begins() {
  Event event = event_;
  event.kind = Kind::kWaitBegin;
  event.host_ns = now_ns();
  DeviceSpans* const spans = spans_of(device_);
  if (spans != nullptr) wait_ = spans->begin(event);
}

void DeviceCollective::wait_ends() {
  if (const auto wait = std::exchange(wait_, nullptr)) DeviceSpans::end(*wait);
}

std::vector<std::shared_ptr<DeviceCollective>> take_device_collectives() { return std::exchange(entered_here, {}); }

std::int32_t index_of_group(const c10d::ProcessGroup& group) { return Groups::of_process().index(group); }

void forget_group(std::int32_t index) { Groups::of_process().forget(index); }

std::vector<NamedGroup> take_new_groups() { return Groups::of_process().take_new(); }

}  // namespace ddp_lab
