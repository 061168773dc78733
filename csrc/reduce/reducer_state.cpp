// Reducer's rare calls: what happens between backwards, not in them.
#include <utility>

#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {

std::vector<std::size_t> Reducer::ready_order() const {
  const Lock lock(mutex_);
  return order_;
}

void Reducer::rebuild(const Assignment& assignment) {
  const Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "buckets can't be assigned anew during a backward");
  assign(assignment);
  rebuilt_ = true;
  order_.clear();
  ++generation_;
  recorder().record(event(Kind::kRebuilt));
}

void Reducer::update_process_group(GroupPointer group, std::int32_t index, const Assignment& assignment) {
  {
    const Lock lock(mutex_);
    TORCH_CHECK(!finalizing_, "the process group can't be replaced while a backward waits for it");
    abandon_backward();
    // The old group is let go outside the lock: its threads may take a while to end.
    std::swap(group_, group);
    group_index_ = index;
    rebuilt_ = false;
    order_.clear();
    assign(assignment);
    ++generation_;
  }
}

bool Reducer::in_flight() const {
  const Lock lock(mutex_);
  return in_flight_;
}

void Reducer::set_comm_hook(HookPointer hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!hook_, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  TORCH_CHECK(!in_flight_, "a comm hook can't be registered during a backward");
  hook_ = std::move(hook);
}

std::int64_t Reducer::step() const {
  const Lock lock(mutex_);
  return step_;
}

void Reducer::set_step(std::int64_t step) {
  const Lock lock(mutex_);
  step_ = step;
}

std::uint16_t Reducer::generation() const {
  const Lock lock(mutex_);
  return generation_;
}

std::vector<Reducer::Times> Reducer::times() const {
  const Lock lock(mutex_);
  return times_;
}

std::optional<std::vector<std::vector<at::Tensor>>> Reducer::gradients_to_inspect(bool anyway) const {
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || in_flight_ || (busy_ && !anyway)) return std::nullopt;
  std::vector<std::vector<at::Tensor>> gradients;
  for (const auto& bucket : buckets_) {
    gradients.emplace_back();
    for (const Slot& slot : bucket->slots()) gradients.back().push_back(slot.variable.grad());
  }
  return gradients;
}

void Reducer::set_inspection_callback(std::function<void(std::int64_t, const Inspections&)> callback) {
  const Lock lock(mutex_);
  inspection_callback_ = std::move(callback);
}

}  // namespace ddp_lab
