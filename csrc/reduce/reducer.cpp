#include "reduce/reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>

#include "record/recorder.h"

namespace ddp_lab {
namespace {

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Records that a bucket is reduced, once: the future's callback or the thread that waits, whoever is first.
void note_reduced(BucketTimes& times, Event event) {
  event.host_ns = now_ns();
  std::int64_t not_yet = 0;
  if (!times.reduced.compare_exchange_strong(not_yet, event.host_ns)) return;
  event.kind = Kind::kBucketReduced;
  recorder().record(event);
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, const Assignment& assignment, GroupPointer group,
                 ReducerOptions options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      group_(std::move(group)),
      group_index_(options_.process_group_index),
      schedule_(assignment) {
  TORCH_CHECK(parameters_.size() == options_.names.size(), "every parameter needs a name");
  places_.resize(parameters_.size());
  assign(assignment);
  for (const auto& bucket : buckets_) {
    const c10::Device device = bucket->device();
    const auto same = [&](const auto& known) { return known.first == device; };
    if (std::any_of(spans_.begin(), spans_.end(), same)) continue;
    if (auto made = DeviceSpans::make(device)) spans_.emplace_back(device, std::move(made));
  }
  add_hooks();
}

Reducer::~Reducer() { remove_hooks(); }

void Reducer::add_hooks() {
  using torch::autograd::variable_list;
  using torch::autograd::utils::LambdaPostHook;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // The variable holds its accumulator weakly, so it is kept here, or the hook would be lost with it.
    NodePointer node = torch::autograd::impl::grad_accumulator(parameters_[i]);
    const std::uintptr_t key = node->add_post_hook(std::make_unique<LambdaPostHook>(
        [this, i](const variable_list& outputs, const variable_list&) {
          on_grad_ready(i);
          return outputs;
        },
        [](torch::autograd::CompiledNodeArgs&) {
          TORCH_CHECK(false, "ddp_lab's DistributedDataParallel does not run under compiled autograd");
        }));
    hooks_.emplace_back(std::move(node), key);
  }
}

void Reducer::remove_hooks() {
  const Lock lock(mutex_);
  for (const auto& [node, key] : hooks_) node->del_post_hook(key);
  hooks_.clear();
}

void Reducer::assign(const Assignment& assignment) {
  std::vector<std::unique_ptr<Bucket>> buckets;
  std::vector<Place> places(parameters_.size());
  std::size_t placed = 0;
  BucketSchedule schedule(assignment);  // refuses empty buckets and parameters in two buckets
  for (const auto& indices : assignment) {
    std::vector<at::Tensor> variables;
    for (const std::size_t index : indices) {
      TORCH_CHECK(index < parameters_.size(), "there is no parameter ", index);
      places[index].bucket = static_cast<std::uint32_t>(buckets.size());
      places[index].slot = static_cast<std::uint32_t>(variables.size());
      places[index].bytes = static_cast<std::int64_t>(parameters_[index].nbytes());
      variables.push_back(parameters_[index]);
      ++placed;
    }
    buckets.push_back(std::make_unique<Bucket>(indices, variables));
  }
  TORCH_CHECK(placed == parameters_.size(), "every parameter must be in a bucket");
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; !buckets_.empty() && i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (!buckets_[places_[i].bucket]->is_view(places_[i].slot, gradient)) continue;
    const at::Tensor& view = buckets[places[i].bucket]->slots()[places[i].slot].view;
    view.copy_(gradient);
    gradient = view;
  }
  buckets_ = std::move(buckets);
  places_ = std::move(places);
  schedule_ = std::move(schedule);
  launched_.assign(buckets_.size(), Launched{});
  times_.assign(buckets_.size(), Times{});
}

bool Reducer::begin_forward(bool sync) {
  const Lock lock(mutex_);
  if (in_flight_ && !inside_backward()) {
    // A graph task that never reached its end was stopped by an exception.
    if (!tasks_.empty()) {
      abandon_backward();
    } else if (sync) {
      const std::string message = unfinished_message();
      abandon_backward();
      TORCH_CHECK(false, message);
    }
  }
  if (!rebuilt_ && !in_flight_ && order_.size() == parameters_.size()) return true;
  busy_ = true;
  recorder().record(event(Kind::kForwardBegin));
  return false;
}

void Reducer::end_forward() {
  const Lock lock(mutex_);
  recorder().record(event(Kind::kForwardEnd));
}

void Reducer::arm(const std::vector<at::Tensor>& outputs) {
  const Lock lock(mutex_);
  if (in_flight_) return;  // a forward inside the backward, as activation checkpointing runs it
  armed_ = true;
  ++arm_;
  backward_begin_ = 0;
  last_task_ = kNoTask;
  schedule_.arm();
  if (!rebuilt_) order_.clear();
  for (const auto& bucket : buckets_) bucket->times = std::make_shared<BucketTimes>();
  for (const auto& [device, spans] : spans_) {
    spans->resolve();
    spans->anchor();
  }
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.register_hook([self = weak_from_this(), arm = arm_](const at::Tensor&) {
      if (const auto reducer = self.lock()) reducer->on_output_gradient(arm);
    });
  }
}

void Reducer::on_output_gradient(std::uint64_t arm) {
  const Lock lock(mutex_);
  if (armed_ && arm == arm_ && backward_begin_ == 0) begin_backward(now_ns());
}

void Reducer::begin_backward(std::int64_t now) {
  backward_begin_ = now;
  recorder().record(event(Kind::kBackwardBegin, now));
}

void Reducer::check_gradient(std::size_t parameter, const at::Tensor& gradient) const {
  const std::string& name = options_.names[parameter];
  TORCH_CHECK(places_[parameter].arrived != arm_, "Expected to mark a variable ready only once. The gradient of '",
              name, "' is ready a second time in the backward of step ", step_, " on rank ", group_->getRank(),
              ". Either backward was called several times over graphs that share it: add the losses up, or run all ",
              "forwards but the last under no_sync(); or it is used by several reentrant backwards: pass ",
              "use_reentrant=False to torch.utils.checkpoint.checkpoint.");
  if (!gradient.defined()) return;
  const at::Tensor& variable = parameters_[parameter];
  TORCH_CHECK(gradient.layout() == at::kStrided, "the gradient of '", name, "' is sparse (", gradient.layout(),
              "): sparse gradients are not supported yet; build the module with sparse=False");
  TORCH_CHECK(gradient.dtype() == variable.dtype() && gradient.device() == variable.device(), "Expected ",
              variable.toString(), " on ", variable.device(), ", got ", gradient.toString(), " on ", gradient.device(),
              " for the gradient of '", name, "'");
}

void Reducer::on_grad_ready(std::size_t parameter) {
  const std::int64_t now = now_ns();
  const Lock lock(mutex_);
  Place& place = places_[parameter];
  Event fact = event(Kind::kGradReady, now);
  fact.parameter = static_cast<std::int32_t>(parameter);
  fact.bytes = place.bytes;
  if (!armed_) {  // under no_sync, or a second backward through the same graph: the gradient only accumulates
    recorder().record(fact);
    return;
  }
  Bucket& bucket = *buckets_[place.bucket];
  at::Tensor& gradient = parameters_[parameter].mutable_grad();
  check_gradient(parameter, gradient);
  enter_task();
  in_flight_ = true;
  if (backward_begin_ == 0) begin_backward(now);
  fact.bucket = static_cast<std::int32_t>(place.bucket);
  recorder().record(fact);
  if (bucket.times->first_ready == 0) bucket.times->first_ready = now;
  place.arrived = arm_;
  if (!rebuilt_) order_.push_back(parameter);

  {
    const at::NoGradGuard no_grad;
    bucket.copy_in(place.slot, gradient, hook_ ? 1 : group_->getSize());
    if (options_.gradient_as_bucket_view && gradient.defined()) gradient = bucket.slots()[place.slot].view;
  }
  const BucketSchedule::Range range = schedule_.mark_ready(parameter);
  if (schedule_.state(place.bucket) != BucketState::kPending) {
    Event ready = event(Kind::kBucketReady, now_ns());
    ready.bucket = fact.bucket;
    ready.bytes = bucket.bytes();
    bucket.times->ready = ready.host_ns;
    recorder().record(ready);
  }
  for (std::size_t b = range.begin; b < range.end; ++b) launch(b);
}

// [Note: the end of a backward]
// Autograd says when a graph task is over by running the callbacks queued in it, and runs none if the task
// failed. So one is queued in every task that brings gradients (a reentrant backward is a task of its own):
// a task that is still listed at the next forward was ended by an exception, and one that is not, with
// buckets missing, ended without reaching all parameters. Gradients may arrive over several backwards.
void Reducer::enter_task() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == last_task_) return;
  last_task_ = task;
  if (std::find(tasks_.begin(), tasks_.end(), task) != tasks_.end()) return;
  tasks_.push_back(task);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), task, arm = arm_] { self->end_of_task(task, arm); });
}

void Reducer::end_of_task(int task, std::uint64_t arm) {
  Lock lock(mutex_);
  TORCH_CHECK(arm != given_up_, "the backward of step ", step_ - 1, " was given up (abandon_backward) on rank ",
              group_->getRank(), " while it ran: its gradients are not averaged");
  if (arm != arm_) return;
  tasks_.erase(std::remove(tasks_.begin(), tasks_.end(), task), tasks_.end());
  last_task_ = kNoTask;
  if (in_flight_ && !finalizing_ && schedule_.all_launched()) finalize(lock);
}

DeviceSpans* Reducer::spans_of(const Bucket& bucket) {
  for (const auto& [device, spans] : spans_) {
    if (device == bucket.device()) return spans.get();
  }
  return nullptr;
}

void Reducer::launch(std::size_t index) {
  Bucket& bucket = *buckets_[index];
  Event fact = event(Kind::kBucketLaunched, now_ns());
  fact.bucket = static_cast<std::int32_t>(index);
  fact.bytes = bucket.bytes();
  bucket.times->launched = fact.host_ns;
  recorder().record(fact);

  std::shared_ptr<DeviceSpans::Span> span;
  if (DeviceSpans* spans = spans_of(bucket)) span = spans->begin(fact);
  launched_[index] = hook_ ? start_hook(*hook_, bucket, index, buckets_.size()) : start_all_reduce(*group_, bucket);
  // Runs where the collective completes, perhaps after this reducer is gone: it holds no pointer to it.
  launched_[index].future->addCallback(
      [fact, span, times = bucket.times](c10::ivalue::Future& future) {
        if (future.hasError()) return;
        if (span) DeviceSpans::end(*span);
        note_reduced(*times, fact);
      },
      /*uses_future=*/span != nullptr);
}

void Reducer::collect(std::size_t index) {
  Bucket& bucket = *buckets_[index];
  const at::Tensor reduced = wait_for(launched_[index], hook_.get(), bucket, index);
  Event fact = event(Kind::kBucketReduced);
  fact.bucket = static_cast<std::int32_t>(index);
  fact.bytes = bucket.bytes();
  note_reduced(*bucket.times, fact);
  const bool as_view = options_.gradient_as_bucket_view;
  for (std::size_t i = 0; as_view && i < bucket.slots().size(); ++i) {
    const Slot& slot = bucket.slots()[i];
    TORCH_CHECK(!slot.variable.grad().defined() || bucket.is_view(i, slot.variable.grad()),
                "Detected at least one parameter gradient is not the expected DDP bucket view with ",
                "gradient_as_bucket_view=True. It is the gradient of '", options_.names[slot.parameter],
                "': something assigned its .grad during the backward.");
  }
  bucket.copy_out(reduced, as_view);
  // The work itself is kept until the next launch. A backend's thread still holds it for a moment; if that were
  // the last reference, dropping it could need the GIL there, which ends a process that is just exiting.
  launched_[index].future.reset();
}

void Reducer::finalize(Lock& lock) {
  const at::NoGradGuard no_grad;
  finalizing_ = true;
  recorder().record(event(Kind::kFinalizeBegin));
  // While this thread waits for the other ranks, others may look at the reducer.
  lock.unlock();
  try {
    for (std::size_t b = 0; b < buckets_.size(); ++b) collect(b);
  } catch (...) {
    lock.lock();
    finalizing_ = false;
    abandon_backward();
    throw;
  }
  lock.lock();
  finish_backward();
}

void Reducer::finish_backward() {
  finalizing_ = in_flight_ = armed_ = busy_ = false;
  const Event end = event(Kind::kBackwardEnd, now_ns());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    schedule_.mark_reduced(b);
    const BucketTimes& times = *buckets_[b]->times;
    times_[b] = {backward_begin_, times.first_ready, times.ready, times.launched, times.reduced, end.host_ns};
  }
  recorder().record(end);
  const std::int64_t step = step_++;
  if (step < inspect_from_ || !inspection_callback_) return;
  inspect_from_ = kNoInspection;
  Inspections found;
  for (const auto& bucket : buckets_) {
    std::vector<at::Tensor> gradients;
    for (const Slot& slot : bucket->slots()) gradients.push_back(slot.variable.grad());
    found.push_back(inspect(gradients));
  }
  inspection_callback_(step, found);
}

void Reducer::abandon() {
  const Lock lock(mutex_);
  if (finalizing_) return;  // the thread that waits does it, as soon as its wait fails
  if (in_flight_) given_up_ = arm_;
  abandon_backward();
}

void Reducer::abandon_backward() {
  if (in_flight_) {
    recorder().record(event(Kind::kAbandoned));
    ++step_;
    for (std::size_t b = 0; b < schedule_.launched(); ++b) {
      buckets_[b]->renew();
      launched_[b] = Launched{};
    }
    for (const auto& [device, spans] : spans_) spans->forget();
  }
  armed_ = in_flight_ = busy_ = false;
  tasks_.clear();
  last_task_ = kNoTask;
  ++arm_;
  if (!rebuilt_) order_.clear();
}

std::string Reducer::unfinished_message() const {
  constexpr std::size_t kMost = 20;
  const std::vector<std::size_t> missing = schedule_.missing();
  std::string names;
  for (std::size_t i = 0; i < std::min(missing.size(), kMost); ++i) {
    names += (i ? ", '" : "'") + options_.names[missing[i]] + "'";
  }
  if (missing.size() > kMost) names += " and " + std::to_string(missing.size() - kMost) + " more";
  return "Expected to have finished reduction in the prior iteration before starting a new one. The backward "
         "of "
         "step " +
         std::to_string(step_) + " brought no gradient on rank " + std::to_string(group_->getRank()) + " for " +
         std::to_string(missing.size()) + " of " + std::to_string(parameters_.size()) + " parameters: " + names +
         ". They took no part in computing the loss. Use all outputs of forward in the loss, remove these "
         "parameters or set requires_grad=False on them before wrapping the model. That backward has been "
         "discarded, so the next forward starts clean.";
}

Event Reducer::event(Kind kind, std::int64_t host_ns) const {
  Event made;
  made.kind = kind;
  made.host_ns = host_ns;
  made.reducer = options_.reducer_id;
  made.process_group = group_index_;
  made.generation = generation_;
  made.step = step_;
  return made;
}

}  // namespace ddp_lab
