#include "observe/launches.h"

#include <algorithm>
#include <mutex>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "comm/collective_interception.h"
#include "record/recorder.h"

namespace ddp_lab {
namespace {

using c10d::CommHookInterface;
using Listener = std::shared_ptr<LaunchListener>;
using Future = c10::intrusive_ptr<c10::ivalue::Future>;

// ---- who listens

std::mutex listeners_mutex;

std::vector<std::weak_ptr<LaunchListener>>& listeners() {
  static auto* const kept = new std::vector<std::weak_ptr<LaunchListener>>;  // other threads may outlive statics
  return *kept;
}

std::vector<Listener> living() {
  const std::lock_guard<std::mutex> lock(listeners_mutex);
  std::vector<Listener> found;
  for (const auto& one : listeners()) {
    if (auto alive = one.lock()) found.push_back(std::move(alive));
  }
  return found;
}

// Runs where the collective completes, perhaps after its reducer is gone.
class LaunchWatch final : public Watch {
 public:
  explicit LaunchWatch(SeenLaunch launch) : launch_(std::move(launch)) {}

  bool on_device() const override { return launch_.span != nullptr; }
  void ended(bool failed) override {
    if (failed) return;
    if (launch_.span) DeviceSpans::end(*launch_.span);
    note_reduced(launch_);
  }

 private:
  const SeenLaunch launch_;
};

Purpose purpose_of(const SeenLaunch& launch) { return {launch.event.reducer, launch.event.bucket}; }

std::shared_ptr<Watch> see_all_reduce(CollectiveCall& call) {
  if (call.summed == nullptr) return nullptr;
  for (const Listener& listener : living()) {
    if (auto launch = listener->launching(*call.summed)) {
      call.purpose = purpose_of(*launch);
      return std::make_shared<LaunchWatch>(std::move(*launch));
    }
  }
  return nullptr;
}

// ---- with a comm hook

template <auto kMember>
struct Opened {
  friend std::unique_ptr<CommHookInterface>& hook_of(c10d::Reducer& reducer) { return reducer.*kMember; }
};
std::unique_ptr<CommHookInterface>& hook_of(c10d::Reducer& reducer);
template struct Opened<&c10d::Reducer::comm_hook_>;

class WatchedHook final : public CommHookInterface {
 public:
  WatchedHook(std::unique_ptr<CommHookInterface> hook, std::weak_ptr<LaunchListener> listener)
      : hook_(std::move(hook)), listener_(std::move(listener)) {}

  Future runHook(c10d::GradBucket& bucket) override {
    std::optional<SeenLaunch> launch;
    if (const Listener listener = listener_.lock()) launch = listener->launching(bucket.getIndex());
    const WithPurpose purpose(launch ? purpose_of(*launch) : Purpose{});
    Future future = hook_->runHook(bucket);
    if (launch && future) {
      const auto watch = std::make_shared<LaunchWatch>(std::move(*launch));
      future->addCallback([watch](c10::ivalue::Future& done) { watch->ended(done.hasError()); },
                          /*uses_future=*/watch->on_device());
    }
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override { return hook_->parseHookResult(result); }

  std::unique_ptr<CommHookInterface> take() { return std::move(hook_); }

 private:
  std::unique_ptr<CommHookInterface> hook_;
  const std::weak_ptr<LaunchListener> listener_;
};

}  // namespace

void note_reduced(const SeenLaunch& launch) {
  std::call_once(*launch.reduced, [&] {
    Event event = launch.event;
    event.kind = Kind::kBucketReduced;
    event.host_ns = now_ns();
    recorder().record(event);
  });
}

void listen(const Listener& listener) {
  set_watcher(Role::kSeesLaunches, &see_all_reduce);
  const std::lock_guard<std::mutex> lock(listeners_mutex);
  auto& all = listeners();
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }), all.end());
  all.push_back(listener);
}

void watch_hook(c10d::Reducer& reducer, const std::weak_ptr<LaunchListener>& listener) {
  auto& hook = hook_of(reducer);
  if (!hook || dynamic_cast<WatchedHook*>(hook.get()) != nullptr) return;
  hook = std::make_unique<WatchedHook>(std::move(hook), listener);
}

void unwatch_hook(c10d::Reducer& reducer) {
  auto& hook = hook_of(reducer);
  if (auto* const watched = dynamic_cast<WatchedHook*>(hook.get())) hook = watched->take();
}

}  // namespace ddp_lab
