// Reducer's rare calls: what happens between backwards, not in them.
#include <algorithm>
#include <utility>

#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {
bool Reducer::in_flight() const {
  const Lock lock(mutex_);
  return in_flight_;
}

void Reducer::install_post_backward_futures(std::vector<FuturePointer> futures) {
  const Lock lock(mutex_);
  reduction_.set_futures(std::move(futures));
}

void Reducer::set_no_sync(bool inside) {
  const Lock lock(mutex_);
  no_sync_ = inside;
}

bool Reducer::take_no_sync_warning() {
  const Lock lock(mutex_);
  if (!no_sync_warning_ || warned_of_no_sync_) return false;
  return warned_of_no_sync_ = true;
}

FuturePointer Reducer::run_comm_hook(std::unique_ptr<GradBucket> bucket) {
  CommHook* hook = nullptr;
  {
    const Lock lock(mutex_);
    hook = reduction_.hook();  // replaced by the thread that trains alone
  }
  return hook ? hook->run(std::move(bucket)) : run_all_reduce(*bucket);
}

FuturePointer Reducer::run_all_reduce(c10d::GradBucket& bucket) {
  GroupPointer group;
  {
    const Lock lock(mutex_);
    group = reduction_.group();
  }
  return all_reduce(*group, bucket);
}

std::int64_t Reducer::step() const {
  const Lock lock(mutex_);
  return origin_.step;
}

void Reducer::set_step(std::int64_t step) {
  const Lock lock(mutex_);
  origin_.step = step;
}

std::uint16_t Reducer::generation() const {
  const Lock lock(mutex_);
  return origin_.generation;
}

void Reducer::set_generation(std::uint16_t generation) {
  const Lock lock(mutex_);
  origin_.generation = generation;
}

Reducer::Report Reducer::report() const {
  const Lock lock(mutex_);
  Report made;
  made.iteration = iteration_;
  const std::vector<std::size_t>& unused = use_.last_unused();
  for (const std::size_t parameter : unused) made.unused_bytes += parameters_[parameter].nbytes();
  made.buckets_reduced = buckets_reduced_;
  for (const std::size_t parameter : last_.order()) {
    if (std::find(unused.begin(), unused.end(), parameter) == unused.end()) made.ready_order.push_back(parameter);
  }
  made.error = last_.error();
  made.times = last_.times();
  return made;
}

void Reducer::fail(const std::string& message) {
  set_error(message);
  TORCH_CHECK(false, message);
}

bool Reducer::graph_was_static() const {
  const Lock lock(mutex_);
  return use_.always_same();
}

at::Tensor Reducer::used_map() {
  const Lock lock(mutex_);
  return use_.here.tensor();
}

std::optional<Inspections> Reducer::inspect_gradients() const {
  const Lock lock(mutex_);
  if (in_flight_) return std::nullopt;
  return buckets_.inspect_gradients();
}

std::optional<Reducer::Averages> Reducer::averages() const {
  Averages found;
  found.lock = Lock(mutex_, std::try_to_lock);
  if (!found.lock.owns_lock()) return std::nullopt;
  const bool changing = busy_ && (options_.gradient_as_bucket_view || sums_pieces());
  found.step = origin_.step - 1;
  if (in_flight_ || changing || found.step < 0) return std::nullopt;
  auto averages = buckets_.averages(found.step);
  if (!averages) return std::nullopt;
  found.buckets = std::move(*averages);
  return found;
}

void Reducer::set_inspection_callback(Inspector::Callback callback) {
  const Lock lock(mutex_);
  inspector_.set_callback(std::move(callback));
}

void Reducer::set_gradient_watch(std::shared_ptr<GradientWatch> watch) {
  const Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "gradients can't be watched from the middle of a backward on");
  if (watch) watch->begin(buckets_.size());  // its first backward may be armed
  watch_.swap(watch);
}

bool Reducer::left_alone(std::size_t parameter) {
  if (use_.unused_anywhere(parameter, mode_ == Mode::kCounted)) return true;
  return !optimized_.empty() && optimized_[parameter] && !parameters_[parameter].grad().defined();
}

bool Reducer::skips(std::size_t bucket) const {
  if (!options_.skip_all_reduce_unused_params || !options_.find_unused_parameters) return false;
  const auto& slots = buckets_[bucket].slots();
  return std::all_of(slots.begin(), slots.end(),
                     [&](const Slot& slot) { return marks_[slot.parameter].unused == arm_; });
}

}  // namespace ddp_lab
