#include "reduce/reducer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/graph_task.h>

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

bool Reducer::begin_forward(bool sync) {
  const Lock lock(mutex_);
  if (awaiting_) fail(messages::not_ended(where()));
  if (in_flight_ && !inside_backward()) {
    // A graph task that never reached its end was stopped by an exception.
    if (!tasks_.empty() && !graph_changed_) {
      abandon_backward();
    } else if (sync) {
      fail_unfinished();
    }
  }
  if (rebuild_due()) return true;
  busy_ = true;
  if (sync) {
    ++iteration_;
    now_times_ = StepTimes{};
    now_times_.forward_begin = now_ns();
  }
  recorder().record(event(Kind::kForwardBegin));
  return false;
}

void Reducer::end_forward() {
  const Lock lock(mutex_);
  now_times_.forward_end = now_ns();
  recorder().record(event(Kind::kForwardEnd, now_times_.forward_end));
}

void Reducer::arm(const std::vector<at::Tensor>& outputs, bool sync) {
  const Lock lock(mutex_);
  if (hooks_.empty() || in_flight_ || !sync)
    return;  // in flight: a forward inside the backward, as activation checkpointing runs it
  const bool again = armed_;
  std::vector<std::size_t> of_earlier;
  if (again) of_earlier.swap(unused_);
  start_backward(false);
  use_.find_unused(outputs, unused_);
  if (again && use_.searches()) {  // several forwards, and perhaps one backward of them all
    std::vector<std::size_t> of_all;
    std::set_intersection(unused_.begin(), unused_.end(), of_earlier.begin(), of_earlier.end(),
                          std::back_inserter(of_all));
    unused_.swap(of_all);
  }
  AutogradHooks::watch(outputs, [self = weak_from_this(), epoch = hooks_.epoch()] {
    if (const auto reducer = self.lock()) reducer->on_output_gradient(epoch);
  });
}

void Reducer::start_backward(bool rearmed) {
  armed_ = true;
  rearmed_ = rearmed;
  ++arm_;
  StaticGraph* const graph = use_.static_graph();
  mode_ = !graph ? Mode::kEager : graph->known() && !rearmed ? Mode::kCounted : Mode::kWhole;
  backward_begin_ = 0;
  buckets_reduced_ = 0;
  reduction_.begin();
  tasks_.choose_root();
  graph_changed_ = looked_for_error_ = false;
  schedule_.arm();
  unused_.clear();
  order_.clear();
  firings_.clear();
  if (graph && !rearmed) graph->arm();
  buckets_.arm();
  if (watches()) watch_->begin(buckets_.size());
}

void Reducer::on_grad_ready(std::size_t parameter, const at::Tensor& arrived) {
  const std::int64_t now = now_ns();
  const Lock lock = gate_.enter();
  if (armed_ && gate_.drops(parameter)) return;
  try {
    if (!take_notice(parameter, now)) return;
    if (!take_in_place(parameter, arrived)) copy_in(parameter);
    mark_ready(parameter);
  } catch (const c10::Error& error) {
    set_error(error.what_without_backtrace());
    throw;
  }
}

// Returns true if the gradient is to be copied in now.
bool Reducer::take_notice(std::size_t parameter, std::int64_t now) {
  const BucketSet::Place& place = buckets_.place(parameter);
  Event fact = event(Kind::kGradReady, now);
  fact.parameter = static_cast<std::int32_t>(parameter);
  fact.bytes = place.bytes;
  access_ = GradientAccess::current();
  access_.with(parameters_[parameter], [&](const at::Tensor& gradient) {
    if (gradient.defined()) use_.here.mark(parameter);
    if (armed_) check_gradient(parameter, gradient);
    return false;
  });
  if (!armed_) {  // under no_sync: the gradient only accumulates
    recorder().record(fact);
    return false;
  }
  if (awaiting_) fail(messages::not_ended(where()));
  enter_task(false);
  in_flight_ = true;
  begin_backward(now);
  if (!completes(parameter)) return false;
  fact.bucket = static_cast<std::int32_t>(place.bucket);
  recorder().record(fact);
  BucketTimes& times = *buckets_[place.bucket].times;
  if (times.first_ready == 0) times.first_ready = now;
  reached(Point::kGradReady, parameter);
  return mode_ != Mode::kWhole;
}

// Whether the gradient is what it will be at the end of this backward. With Mode::kWhole nobody knows: true for the
// first arrival alone.
bool Reducer::completes(std::size_t parameter) {
  Mark& mark = marks_[parameter];
  const bool first = mark.arrived != arm_;
  if (mode_ == Mode::kEager) {
    if (!first) {
      fail(messages::ready_twice(where(), parameter, options_.names[parameter], mark.unused == arm_));
    }
    return true;
  }
  if (mode_ == Mode::kWhole) {
    mark.arrived = arm_;
    firings_.push_back(parameter);
    if (!rearmed_) use_.static_graph()->count(parameter);
    return first;
  }
  const StaticGraph::Arrival arrival = use_.static_graph()->arrive(parameter);
  if (arrival == StaticGraph::Arrival::kChanged) {
    graph_changed_ = true;
    fail(messages::graph_changed(where(), options_.names[parameter]));
  }
  return arrival == StaticGraph::Arrival::kComplete;
}

void Reducer::check_gradient(std::size_t parameter, const at::Tensor& gradient) {
  if (!gradient.defined()) return;
  const Bucket& bucket = buckets_.of(parameter);
  const bool fits = bucket.sparse() || gradient.layout() == at::kStrided;
  // With a dtype of its own the bucket casts.
  const bool same = gradient.scalar_type() == bucket.dtype() || (options_.dtype && gradient.is_floating_point());
  if (fits && same && gradient.device() == bucket.device()) return;
  fail(messages::unexpected_type(
      options_.names[parameter], c10::str(bucket.dtype(), " on ", bucket.device()),
      c10::str(gradient.is_sparse() ? "sparse " : "", gradient.scalar_type(), " on ", gradient.device())));
}

bool Reducer::take_in_place(std::size_t parameter, const at::Tensor& arrived) {
  if (!sums_pieces() || reduction_.hook() || watches() || gate_.breakpoints().any() || access_.in_context())
    return false;
  const BucketSet::Place& place = buckets_.place(parameter);
  const at::Tensor& gradient = parameters_[parameter].grad();
  return buckets_[place.bucket].take_in_place(place.slot, gradient, arrived, options_.gradient_as_bucket_view);
}

void Reducer::copy_in(std::size_t parameter) {
  const at::NoGradGuard no_grad;
  const BucketSet::Place& place = buckets_.place(parameter);
  Bucket& bucket = buckets_[place.bucket];
  access_.with(parameters_[parameter], [&](at::Tensor& gradient) {
    return bucket.copy_in(place.slot, gradient, reduction_.divisor(), options_.gradient_as_bucket_view);
  });
}

void Reducer::mark_ready(std::size_t parameter) {
  const BucketSet::Place& place = buckets_.place(parameter);
  marks_[parameter].arrived = arm_;
  order_.push_back(parameter);
  const BucketSchedule::Range range = schedule_.mark_ready(parameter);
  if (schedule_.state(place.bucket) != BucketState::kPending) {
    Event ready = event(Kind::kBucketReady, now_ns());
    ready.bucket = static_cast<std::int32_t>(place.bucket);
    Bucket& bucket = buckets_[place.bucket];
    ready.bytes = bucket.bytes();
    bucket.times->ready = ready.host_ns;
    recorder().record(ready);
    reached(Point::kBucketReady, place.bucket);
  }
  for (std::size_t b = range.begin; b < range.end; ++b) launch(b);
  if (!range.empty() && schedule_.all_launched() && flushes() && !reduction_.hook())
    use_.here.start(*reduction_.group());
}

void Reducer::launch(std::size_t index) {
  Bucket& bucket = buckets_[index];
  Event fact = event(Kind::kBucketLaunched, now_ns());
  fact.bucket = static_cast<std::int32_t>(index);
  fact.bytes = bucket.bytes();
  bucket.times->launched = fact.host_ns;
  if (now_times_.communication_begin == 0) now_times_.communication_begin = fact.host_ns;
  recorder().record(fact);
  if (skips(index)) {
    launched_[index] = Launched{};
    return;
  }
  ++buckets_reduced_;
  bucket.flush(reduction_.divisor());
  if (watches() && !shadow_) watch_->before(index, bucket, reduction_.divisor());
  const std::shared_ptr<DeviceSpans::Span> span = buckets_.begin_span(bucket, fact);
  launched_[index] = reduction_.start(bucket, index, buckets_.size());
  // Runs where the collective completes, perhaps after this reducer is gone: it holds no pointer to it.
  launched_[index].future->addCallback(
      [fact, span, times = bucket.times](c10::ivalue::Future& future) {
        if (future.hasError()) return;
        if (span) DeviceSpans::end(*span);
        note_reduced(*times, fact);
      },
      /*uses_future=*/span != nullptr);
  reached(Point::kLaunched, index);
}

void Reducer::finalize(Lock& lock) {
  const at::NoGradGuard no_grad;
  finalizing_ = true;
  const Event begin = event(Kind::kFinalizeBegin, now_ns());
  if (!awaiting_) now_times_.backward_compute_end = begin.host_ns;
  recorder().record(begin);
  // While this thread waits for the other ranks, others may look at the reducer.
  lock.unlock();
  try {
    if (reduction_.hook() && flushes()) start_used_map_after_hooks();
    for (std::size_t b = 0; b < buckets_.size(); ++b) copy_out(b);
    now_times_.communication_end = now_ns();
    reduction_.wait_for_futures();
    if (mode_ == Mode::kWhole && !rearmed_) use_.learn(shadow_);
  } catch (const std::exception& error) {
    const std::string shared = error_elsewhere();
    lock.lock();
    finalizing_ = false;
    abandon_backward();
    set_error(shared.empty() ? error.what() : shared);
    if (!shared.empty()) fail(shared);
    throw;
  }
  lock.lock();
  finish_backward();
  if (buckets_.release_lazy()) launched_.assign(buckets_.size(), Launched{});
  tell_watch(lock);
}

// A comm hook may communicate from its futures' callbacks (PowerSGD does), at a time of its own on each rank. A sum
// that is started meanwhile would meet another collective on the other ranks.
void Reducer::start_used_map_after_hooks() {
  for (const Launched& launched : launched_) {
    if (launched.future) launched.future->wait();
  }
  use_.here.start(*reduction_.group());
}

void Reducer::copy_out(std::size_t index) {
  Bucket& bucket = buckets_[index];
  Event fact = event(Kind::kBucketReduced);
  fact.bucket = static_cast<std::int32_t>(index);
  fact.bytes = bucket.bytes();
  const bool skipped = !launched_[index].future;
  const at::Tensor reduced = skipped ? at::Tensor() : reduction_.wait(launched_[index], bucket, index);
  note_reduced(*bucket.times, fact);
  reached(Point::kReduced, index, /*locked=*/false);
  if (skipped) return;
  look_for_error(bucket.first_part(reduced));
  if (watches()) watch_->after(index, reduced);
  if (shadow_) return bucket.note_average(reduced, false, false, origin_.step);
  const bool elsewhere = bucket.in_place();
  bucket.copy_out(reduced, options_.gradient_as_bucket_view, access_,
                  [&](std::size_t slot) { return left_alone(bucket.slots()[slot].parameter); });
  bucket.note_average(reduced, options_.gradient_as_bucket_view, elsewhere, origin_.step);
  // The work itself is kept until the next launch. A backend's thread still holds it for a moment; if that were
  // the last reference, dropping it could need the GIL there, which ends a process that is just exiting.
  launched_[index].future.reset();
}

}  // namespace ddp_lab
