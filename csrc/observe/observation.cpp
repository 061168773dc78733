#include "observe/observation.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_map>

namespace ddp_lab {

std::vector<at::Tensor> Observation::parameters_of(const c10d::Reducer& reducer) {
  std::vector<at::Tensor> found;
  for (const c10d::GradBucket& bucket : reducer.get_grad_buckets(/*return_zero_tensors=*/false)) {
    for (const at::Tensor& parameter : bucket.getParameters()) found.push_back(parameter);
  }
  return found;
}

Observation::Observation(const std::shared_ptr<c10d::Reducer>& reducer, std::vector<at::Tensor> parameters,
                         EventOrigin origin, bool static_graph)
    : reducer_(reducer), parameters_(std::move(parameters)), origin_(origin), static_graph_(static_graph) {
  arrivals_.resize(parameters_.size());
}

Observation::~Observation() { stop(); }

// [Note: observing before torch]
// Autograd calls the hooks of an accumulator in the order in which they stand there, and torch's own copies the
// gradient into its bucket and launches what is complete. Ours has to say before that when the gradient was there, so
// it is put in front.
void Observation::start() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto on_gradient = [self = weak_from_this(), i](const torch::autograd::variable_list&) {
      if (const auto observation = self.lock()) observation->on_gradient(i);
    };
    hooks_.add(parameters_[i], on_gradient, /*first=*/true);
  }
  listen(shared_from_this());
}

void Observation::stop() {
  const Lock lock(mutex_);
  const auto reducer = reducer_.lock();
  if (reducer && !hooks_.empty()) unwatch_hook(*reducer);
  hooks_.remove();
  armed_ = false;
  ++arm_;
}

Observation::Assignment Observation::read_buckets(bool rebuilt) {
  const auto reducer = reducer_.lock();
  TORCH_CHECK(reducer, "the observed model no longer exists");
  const auto theirs = reducer->get_grad_buckets(/*return_zero_tensors=*/false);
  std::unordered_map<const at::TensorImpl*, std::size_t> index_of;
  for (std::size_t i = 0; i < parameters_.size(); ++i) index_of[parameters_[i].unsafeGetTensorImpl()] = i;
  const Lock lock(mutex_);
  Assignment assignment;
  buckets_.clear();
  bucket_of_.assign(parameters_.size(), 0);
  for (const c10d::GradBucket& one : theirs) {
    Bucket bucket;
    bucket.buffer = one.getBuffer();
    for (const at::Tensor& parameter : one.getParameters()) {
      const std::size_t index = index_of.at(parameter.unsafeGetTensorImpl());
      bucket.parameters.push_back(index);
      bucket_of_[index] = buckets_.size();
      bucket.device = parameter.device();
      bucket.bytes += static_cast<std::int64_t>(parameter.nbytes());
    }
    if (bucket.buffer.defined()) bucket.bytes = static_cast<std::int64_t>(bucket.buffer.nbytes());
    spans_.add(bucket.device);
    assignment.push_back(bucket.parameters);
    buckets_.push_back(std::move(bucket));
  }
  if (rebuilt) {
    ++origin_.generation;
    recorder().record(new_event(Kind::kRebuilt));
  }
  return assignment;
}

void Observation::update(std::int32_t process_group_index, bool static_graph) {
  const Lock lock(mutex_);
  origin_.process_group = process_group_index;
  static_graph_ = static_graph;
}

void Observation::begin_forward(bool sync) {
  const bool inside_backward = torch::autograd::get_current_graph_task_id() != -1;
  const Lock lock(mutex_);
  if (!inside_backward) {
    if (const auto reducer = reducer_.lock()) watch_hook(*reducer, weak_from_this());
    if (sync && armed_ && backward_begin_ != 0) {  // it was ended by an exception
      recorder().record(new_event(Kind::kAbandoned));
      spans_.forget();
      ++origin_.step;
      armed_ = false;
      ++arm_;
    }
  }
  recorder().record(new_event(Kind::kForwardBegin));
}

void Observation::end_forward(const std::vector<at::Tensor>& outputs, bool sync) {
  const bool inside_backward = torch::autograd::get_current_graph_task_id() != -1;
  const Lock lock(mutex_);
  recorder().record(new_event(Kind::kForwardEnd));
  if (!sync || inside_backward) return;
  armed_ = true;
  ++arm_;
  backward_begin_ = 0;
  launches_.clear();
  tasks_.clear();
  std::fill(arrivals_.begin(), arrivals_.end(), 0);
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.parameters.size();
    bucket.last_arrival = 0;
    bucket.ready = false;
  }
  spans_.anchor();
  AutogradHooks::watch(outputs, [self = weak_from_this(), arm = arm_] {
    if (const auto observation = self.lock()) observation->on_output_gradient(arm);
  });
}

void Observation::on_output_gradient(std::uint64_t arm) {
  const Lock lock(mutex_);
  if (armed_ && arm == arm_) begin_backward(now_ns());
}

void Observation::begin_backward(std::int64_t now) {
  if (backward_begin_ != 0) return;
  backward_begin_ = now;
  recorder().record(new_event(Kind::kBackwardBegin, now));
}

void Observation::on_gradient(std::size_t parameter) {
  const std::int64_t now = now_ns();
  const Lock lock(mutex_);
  Event event = new_event(Kind::kGradReady, now);
  event.parameter = static_cast<std::int32_t>(parameter);
  event.bytes = static_cast<std::int64_t>(parameters_[parameter].nbytes());
  if (!armed_) {  // under no_sync: the gradient only accumulates
    recorder().record(event);
    return;
  }
  enter_task();
  begin_backward(now);
  if (!is_complete(parameter)) return;
  const std::size_t index = bucket_of_[parameter];
  event.bucket = static_cast<std::int32_t>(index);
  recorder().record(event);
  Bucket& bucket = buckets_[index];
  bucket.last_arrival = now;
  if (bucket.missing > 0 && --bucket.missing == 0 && !(static_graph_ && expected_.empty())) {
    note_ready(index, now_ns());
  }
}

// With a static graph, in its first backward: only the first arrival counts, since nobody knows which is the last.
bool Observation::is_complete(std::size_t parameter) {
  const std::uint32_t arrived = ++arrivals_[parameter];
  return arrived == (expected_.empty() ? 1 : expected_[parameter]);
}

void Observation::note_ready(std::size_t index, std::int64_t now) {
  Bucket& bucket = buckets_[index];
  if (bucket.ready) return;
  bucket.ready = true;
  Event event = new_event(Kind::kBucketReady, now);
  event.bucket = static_cast<std::int32_t>(index);
  event.bytes = bucket.bytes;
  recorder().record(event);
}

std::optional<SeenLaunch> Observation::launching(const at::Tensor& buffer) {
  const Lock lock(mutex_);
  if (!armed_ || backward_begin_ == 0 || launches_.size() == buckets_.size()) return std::nullopt;
  const at::Tensor& next = buckets_[launches_.size()].buffer;
  // Torch makes the sparse ones anew in each backward, and views of complex ones as reals.
  const bool same = next.defined() ? !buffer.is_sparse() && buffer.nbytes() == next.nbytes() && buffer.is_alias_of(next)
                                   : buffer.is_sparse();
  if (!same) return std::nullopt;
  return launch_next();
}

std::optional<SeenLaunch> Observation::launching(std::size_t index) {
  const Lock lock(mutex_);
  if (!armed_ || backward_begin_ == 0 || index != launches_.size() || index >= buckets_.size()) return std::nullopt;
  return launch_next();
}

std::optional<SeenLaunch> Observation::launch_next() {
  const std::size_t index = launches_.size();
  const Bucket& bucket = buckets_[index];
  const std::int64_t now = now_ns();
  // Some of its parameters are unused, which torch finds out when the backward begins: the last of the others, or that,
  // has completed it. In the first backward of a static graph it is complete only now.
  const bool whole = static_graph_ && expected_.empty();
  note_ready(index, whole ? now : std::max(backward_begin_, bucket.last_arrival));
  SeenLaunch launch;
  launch.event = new_event(Kind::kBucketLaunched, now);
  launch.event.bucket = static_cast<std::int32_t>(index);
  launch.event.bytes = bucket.bytes;
  recorder().record(launch.event);
  launch.span = spans_.begin(bucket.device, launch.event);
  launches_.push_back(launch);
  return launch;
}

// [Note: the end of torch's backward]
// Torch waits for its buckets in a callback that it queues in autograd's graph task when the last one was launched (in
// the first backward of a static graph: with the first gradient, and launches them there). The callback that is queued
// here with the first gradient of a task, before torch's hook has seen it, runs before torch's; the one that it queues
// then runs after. Where a nested backward (of a checkpoint) brings the last gradient, torch waits at that one's end.
void Observation::enter_task() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1 || !tasks_.enter(task)) return;
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), task, arm = arm_] {
    if (const auto observation = self.lock()) observation->end_of_task(task, arm);
  });
}

void Observation::end_of_task(int task, std::uint64_t arm) {
  const Lock lock(mutex_);
  if (!armed_ || arm != arm_) return;
  const bool whole = static_graph_ && expected_.empty() && launches_.size() == 0 && tasks_.is_root(task);
  if (launches_.size() < buckets_.size() && !whole) return;
  recorder().record(new_event(Kind::kFinalizeBegin));
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), arm] {
    if (const auto observation = self.lock()) observation->end_of_backward(arm);
  });
}

void Observation::end_of_backward(std::uint64_t arm) {
  Lock lock(mutex_);
  if (!armed_ || arm != arm_ || launches_.size() < buckets_.size()) return;
  armed_ = false;
  if (static_graph_ && expected_.empty()) expected_ = arrivals_;
  for (const SeenLaunch& launch : launches_) note_reduced(launch);
  recorder().record(new_event(Kind::kBackwardEnd));
  ++origin_.step;
  inspect_if_asked(lock);
}

std::int64_t Observation::step() const {
  const Lock lock(mutex_);
  return origin_.step;
}

std::uint16_t Observation::generation() const {
  const Lock lock(mutex_);
  return origin_.generation;
}

void Observation::set_inspection_callback(Inspector::Callback callback) {
  const Lock lock(mutex_);
  inspector_.set_callback(std::move(callback));
}

// On a thread of the backward: no other may look at gradients, see [Note: inspecting gradients].
void Observation::inspect_if_asked(Lock& lock) {
  const std::int64_t step = origin_.step - 1;
  const Inspector::Callback callback = inspector_.take(step);
  if (!callback) return;
  Inspections found;
  for (const Bucket& bucket : buckets_) {
    std::vector<at::Tensor> gradients;
    for (const std::size_t parameter : bucket.parameters) gradients.push_back(parameters_[parameter].grad());
    found.push_back(inspect(gradients));
  }
  lock.unlock();  // it takes the GIL, whose holder may want the lock
  callback(step, found);
}

}  // namespace ddp_lab
