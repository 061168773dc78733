#include "observe/launches.h"

#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/endable_work.h"
#include "record/recorder.h"

namespace ddp_lab {
namespace {

using c10d::CommHookInterface;
using Listener = std::shared_ptr<LaunchListener>;
using Future = c10::intrusive_ptr<c10::ivalue::Future>;
using Work = c10::intrusive_ptr<c10d::Work>;
using AllReduced = std::tuple<std::vector<at::Tensor>, Work>;

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
void note_when_complete(const Future& future, SeenLaunch launch) {
  const bool on_device = launch.span != nullptr;
  future->addCallback(
      [launch = std::move(launch)](c10::ivalue::Future& done) {
        if (done.hasError()) return;
        if (launch.span) DeviceSpans::end(*launch.span);
        note_reduced(launch);
      },
      /*uses_future=*/on_device);
}

// ---- without a comm hook

AllReduced pass_all_reduce(c10::DispatchKeySet keys, at::TensorList tensors,
                           const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           const c10::intrusive_ptr<c10d::ReduceOp>& reduction,
                           const std::optional<at::Tensor>& sparse_indices, bool asynchronous, std::int64_t timeout) {
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("c10d::allreduce_", "")
                                    .typed<AllReduced(at::TensorList, const c10::intrusive_ptr<c10d::ProcessGroup>&,
                                                      const c10::intrusive_ptr<c10d::ReduceOp>&,
                                                      const std::optional<at::Tensor>&, bool, std::int64_t)>();
  std::optional<SeenLaunch> launch;
  if (tensors.size() == 1) {
    for (const Listener& listener : living()) {
      if ((launch = listener->launching(tensors.front()))) break;
    }
  }
  const auto behind = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  AllReduced made = operation.redispatch(behind, tensors, group, reduction, sparse_indices, asynchronous, timeout);
  std::get<1>(made) = endable(std::move(std::get<1>(made)), *group);
  if (launch) note_when_complete(std::get<1>(made)->getFuture(), std::move(*launch));
  return made;
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
    Future future = hook_->runHook(bucket);
    if (launch && future) note_when_complete(future, std::move(*launch));
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
    Event fact = launch.fact;
    fact.kind = Kind::kBucketReduced;
    fact.host_ns = now_ns();
    recorder().record(fact);
  });
}

void pass_all_reduces() {
  static auto* const kernels = [] {
    auto* const made = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__,
                                          static_cast<std::uint32_t>(__LINE__));
    made->impl("allreduce_", TORCH_FN(pass_all_reduce));
    return made;
  }();
  static_cast<void>(kernels);
}

void listen(const Listener& listener) {
  pass_all_reduces();
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
