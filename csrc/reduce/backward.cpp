#include "reduce/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "comm/collective_interception.h"

namespace ddp_lab {
namespace {

// Records that a bucket is reduced, once: the future's callback or the thread that waits, whoever is first.
void note_reduced(BucketTimes& times, Event event) {
  event.host_ns = now_ns();
  std::int64_t not_yet = 0;
  if (!times.reduced.compare_exchange_strong(not_yet, event.host_ns)) return;
  event.kind = Kind::kBucketReduced;
  recorder().record(event);
}

}  // namespace

Backward::Backward(const BucketSet::Assignment& assignment, const std::vector<at::Tensor>& parameters,
                   const ReducerOptions& options, const EventOrigin& origin,
                   const std::shared_ptr<GradientWatch>& watch, Reduction& reduction, ParameterUse& use,
                   BucketSet& buckets, PauseGate& gate)
    : parameters_(parameters),
      options_(options),
      origin_(origin),
      watch_(watch),
      reduction_(reduction),
      use_(use),
      buckets_(buckets),
      gate_(gate),
      schedule_(assignment),
      launched_(buckets.size()),
      marks_(parameters.size()) {
  arrivals_.reserve(parameters.size());
}

void Backward::assign(const BucketSet::Assignment& assignment) {
  for (Launched& launched : launched_) launched = Launched{};  // they hold the old buffers
  schedule_ = buckets_.assign(assignment);
  launched_.resize(buckets_.size());
}

void Backward::begin_forward(bool sync) {
  forward_begun_ = true;
  if (sync) {
    times_ = StepTimes{};
    times_.forward_begin = now_ns();
  }
  recorder().record(origin_.event(Kind::kForwardBegin));
}

void Backward::end_forward() {
  times_.forward_end = now_ns();
  recorder().record(origin_.event(Kind::kForwardEnd, times_.forward_end));
}

void Backward::arm_after(const std::vector<at::Tensor>& outputs) {
  const bool again = phase_.armed();
  std::vector<std::size_t> of_earlier;
  if (again) of_earlier.swap(unused_);
  arm(/*rearmed=*/false);
  use_.find_unused(outputs, unused_);
  if (!again || !use_.searches()) return;
  std::vector<std::size_t> of_all;  // several forwards, and perhaps one backward of them all
  std::set_intersection(unused_.begin(), unused_.end(), of_earlier.begin(), of_earlier.end(),
                        std::back_inserter(of_all));
  unused_.swap(of_all);
}

void Backward::arm(bool rearmed, bool shadow) {
  phase_.arm();
  rearmed_ = rearmed;
  shadow_ = shadow;
  ++arm_;
  StaticGraph* const graph = use_.static_graph();
  mode_ = !graph ? Mode::kEager : graph->known() && !rearmed ? Mode::kCounted : Mode::kWhole;
  begin_ = 0;
  buckets_reduced_ = 0;
  reduction_.begin();
  tasks.choose_root();
  graph_changed_ = looked_for_error_ = false;
  schedule_.arm();
  unused_.clear();
  order_.clear();
  arrivals_.clear();
  if (graph && !rearmed) graph->arm();
  buckets_.arm();
  if (watches()) watch_->begin(buckets_.size());
}

bool Backward::begin(std::int64_t now, bool in_flight) {
  if (in_flight) phase_.run();
  if (begin_ != 0) return false;
  begin_ = times_.backward_begin = now;
  recorder().record(origin_.event(Kind::kBackwardBegin, now));
  if (!unused_.empty()) phase_.run();
  for (const std::size_t parameter : unused_) marks_[parameter].unused = arm_;
  for (const std::size_t parameter : unused_) {
    if (!skips(buckets_.place(parameter).bucket)) copy_in(parameter);  // which divides a gradient that is a view
    mark_ready(parameter);
  }
  return true;
}

Event Backward::on_gradient(std::size_t parameter, std::int64_t now) {
  Event event = origin_.event(Kind::kGradReady, now);
  event.parameter = static_cast<std::int32_t>(parameter);
  event.bytes = buckets_.place(parameter).bytes;
  access_ = GradientAccess::current();
  access_.with(parameters_[parameter], [&](const at::Tensor& gradient) {
    if (gradient.defined()) use_.here.mark(parameter);
    if (phase_.armed()) check_gradient(parameter, gradient);
    return false;
  });
  return event;
}

void Backward::accept_gradient(std::size_t parameter, Event event, const at::Tensor& arrived) {
  if (!is_last_arrival(parameter)) return;
  event.bucket = static_cast<std::int32_t>(buckets_.place(parameter).bucket);
  recorder().record(event);
  BucketTimes& times = *buckets_.of(parameter).times;
  if (times.first_ready == 0) times.first_ready = event.host_ns;
  reached(Point::kGradReady, parameter);
  if (mode_ == Mode::kWhole) return;
  if (!take_in_place(parameter, arrived)) copy_in(parameter);
  mark_ready(parameter);
}

// Whether the gradient is what it will be at the end of this backward. With Mode::kWhole nobody knows: true for the
// first arrival alone.
bool Backward::is_last_arrival(std::size_t parameter) {
  Mark& mark = marks_[parameter];
  const bool first = mark.arrived != arm_;
  if (mode_ == Mode::kEager) {
    TORCH_CHECK(first, messages::ready_twice(where(), parameter, options_.names[parameter], mark.unused == arm_));
    return true;
  }
  if (mode_ == Mode::kWhole) {
    mark.arrived = arm_;
    arrivals_.push_back(parameter);
    if (!rearmed_) use_.static_graph()->count(parameter);
    return first;
  }
  const StaticGraph::Arrival arrival = use_.static_graph()->arrive(parameter);
  if (arrival == StaticGraph::Arrival::kChanged) {
    graph_changed_ = true;
    TORCH_CHECK(false, messages::graph_changed(where(), options_.names[parameter]));
  }
  return arrival == StaticGraph::Arrival::kComplete;
}

void Backward::check_gradient(std::size_t parameter, const at::Tensor& gradient) const {
  if (!gradient.defined()) return;
  const Bucket& bucket = buckets_.of(parameter);
  const bool fits = bucket.sparse() || gradient.layout() == at::kStrided;
  // With a dtype of its own the bucket casts.
  const bool same = gradient.scalar_type() == bucket.dtype() || (options_.dtype && gradient.is_floating_point());
  TORCH_CHECK(fits && same && gradient.device() == bucket.device(),
              messages::unexpected_type(
                  options_.names[parameter], c10::str(bucket.dtype(), " on ", bucket.device()),
                  c10::str(gradient.is_sparse() ? "sparse " : "", gradient.scalar_type(), " on ", gradient.device())));
}

bool Backward::take_in_place(std::size_t parameter, const at::Tensor& arrived) {
  if (!reduction_.sums_pieces() || reduction_.hook() || watches() || gate_.breakpoints().any() || access_.in_context())
    return false;
  const BucketSet::Place& place = buckets_.place(parameter);
  const at::Tensor& gradient = parameters_[parameter].grad();
  return buckets_[place.bucket].take_in_place(place.slot, gradient, arrived, options_.gradient_as_bucket_view);
}

void Backward::copy_in(std::size_t parameter) {
  const at::NoGradGuard no_grad;
  const BucketSet::Place& place = buckets_.place(parameter);
  Bucket& bucket = buckets_[place.bucket];
  access_.with(parameters_[parameter], [&](at::Tensor& gradient) {
    return bucket.copy_in(place.slot, gradient, reduction_.divisor(), options_.gradient_as_bucket_view);
  });
}

void Backward::mark_ready(std::size_t parameter) {
  const BucketSet::Place& place = buckets_.place(parameter);
  marks_[parameter].arrived = arm_;
  order_.push_back(parameter);
  const BucketSchedule::Range range = schedule_.mark_ready(parameter);
  if (schedule_.state(place.bucket) != BucketState::kPending) {
    Event ready = origin_.event(Kind::kBucketReady, now_ns());
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

void Backward::launch(std::size_t index) {
  Bucket& bucket = buckets_[index];
  Event event = origin_.event(Kind::kBucketLaunched, now_ns());
  event.bucket = static_cast<std::int32_t>(index);
  event.bytes = bucket.bytes();
  bucket.times->launched = event.host_ns;
  if (times_.communication_begin == 0) times_.communication_begin = event.host_ns;
  recorder().record(event);
  if (skips(index)) {
    launched_[index] = Launched{};
    return;
  }
  ++buckets_reduced_;
  bucket.flush(reduction_.divisor());
  if (watches() && !shadow_) watch_->before(index, bucket, reduction_.divisor());
  const std::shared_ptr<DeviceSpans::Span> span = buckets_.begin_span(bucket, event);
  {
    const WithPurpose purpose({event.reducer, event.bucket});
    launched_[index] = reduction_.start(bucket, index, buckets_.size());
  }
  // Runs where the collective completes, perhaps after this reducer is gone: it holds no pointer to it.
  launched_[index].future->addCallback(
      [event, span, times = bucket.times](c10::ivalue::Future& future) {
        if (future.hasError()) return;
        if (span) DeviceSpans::end(*span);
        note_reduced(*times, event);
      },
      /*uses_future=*/span != nullptr);
  reached(Point::kLaunched, index);
}

bool Backward::skips(std::size_t bucket) const {
  if (!options_.skip_all_reduce_unused_params || !options_.find_unused_parameters) return false;
  const auto& slots = buckets_[bucket].slots();
  return std::all_of(slots.begin(), slots.end(),
                     [&](const Slot& slot) { return marks_[slot.parameter].unused == arm_; });
}

bool Backward::flush() {
  if (mode_ == Mode::kWhole) flush_arrivals();
  if (flushes() && !schedule_.all_launched()) {
    for (const std::size_t parameter : schedule_.missing()) {
      copy_in(parameter);
      mark_ready(parameter);
    }
  }
  return schedule_.all_launched();
}

// In the order in which each arrived for the last time.
void Backward::flush_arrivals() {
  std::vector<std::size_t> last;
  std::vector<bool> seen(parameters_.size(), false);
  for (auto arrival = arrivals_.rbegin(); arrival != arrivals_.rend(); ++arrival) {
    if (!seen[*arrival]) last.push_back(*arrival);
    seen[*arrival] = true;
  }
  for (auto parameter = last.rbegin(); parameter != last.rend(); ++parameter) {
    copy_in(*parameter);
    mark_ready(*parameter);
  }
}

void Backward::await_caller() {
  phase_.await_caller();
  times_.backward_compute_end = now_ns();
}

void Backward::begin_finalize() {
  const Event begin = origin_.event(Kind::kFinalizeBegin, now_ns());
  if (!phase_.awaits_caller()) times_.backward_compute_end = begin.host_ns;
  phase_.finalize();
  recorder().record(begin);
}

void Backward::reduce() {
  if (reduction_.hook() && flushes()) {
    // A comm hook may communicate from its futures' callbacks (PowerSGD does), at a time of its own on each rank. A sum
    // that is started meanwhile would meet another collective on the other ranks.
    for (const Launched& launched : launched_) {
      if (launched.future) launched.future->wait();
    }
    use_.here.start(*reduction_.group());
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) copy_out(b);
  times_.communication_end = now_ns();
  reduction_.wait_for_futures();
  if (learns()) use_.learn(shadow_);
}

void Backward::copy_out(std::size_t index) {
  Bucket& bucket = buckets_[index];
  Event event = origin_.event(Kind::kBucketReduced);
  event.bucket = static_cast<std::int32_t>(index);
  event.bytes = bucket.bytes();
  const bool skipped = !launched_[index].future;
  const at::Tensor reduced = skipped ? at::Tensor() : reduction_.wait(launched_[index], bucket, index);
  note_reduced(*bucket.times, event);
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

bool Backward::left_alone(std::size_t parameter) {
  if (use_.unused_anywhere(parameter, mode_ == Mode::kCounted)) return true;
  return !options_.optimized.empty() && options_.optimized[parameter] && !parameters_[parameter].grad().defined();
}

void Backward::look_for_error(const at::Tensor& reduced) {
  if (looked_for_error_ || reduction_.hook() || !SharedError::marks(reduced)) return;
  looked_for_error_ = true;
  const std::string found = shared_error().found();
  TORCH_CHECK(found.empty(), found);
}

std::string Backward::error_elsewhere() const { return errors_are_shared() ? shared_error().found() : std::string(); }

void Backward::share_error(const std::string& message) {
  if (!errors_are_shared()) return;
  std::vector<at::Tensor> unlaunched;
  for (std::size_t b = schedule_.launched(); b < buckets_.size() && !buckets_[b].sparse(); ++b) {
    buckets_[b].hold();
    unlaunched.push_back(buckets_[b].buffer());
  }
  shared_error().raise_everywhere(message, unlaunched);
}

BucketReport Backward::report_of(std::size_t bucket, std::int64_t end) const {
  const BucketTimes& times = *buckets_[bucket].times;
  return {begin_, times.first_ready, times.ready, times.launched, times.reduced, end};
}

void Backward::end(LastStep& last) {
  phase_.end();
  forward_begun_ = false;
  const Event end = origin_.event(Kind::kBackwardEnd, now_ns());
  for (std::size_t b = 0; b < buckets_.size(); ++b) schedule_.mark_reduced(b);
  last.write(times_, order_, [&](std::size_t b) { return report_of(b, end.host_ns); });
  recorder().record(end);
  use_.here.reset();
  reduction_.end();
}

void Backward::release_buffers() {
  if (buckets_.release_lazy()) launched_.assign(buckets_.size(), Launched{});
}

bool Backward::abandon(bool by_caller) {
  const bool in_flight = phase_.in_flight();
  if (in_flight) {
    if (by_caller) given_up_ = arm_;
    recorder().record(origin_.event(Kind::kAbandoned));
    buckets_.abandon(schedule_.launched());
    for (std::size_t b = 0; b < schedule_.launched(); ++b) launched_[b] = Launched{};
    use_.here.abandon();
  }
  phase_.end();
  forward_begun_ = graph_changed_ = false;
  tasks.clear();
  reduction_.end();
  ++arm_;
  return in_flight;
}

void Backward::stop(Point point, std::size_t index, bool locked) {
  const std::uint64_t arm = arm_;
  gate_.stop({point, index, origin_.step, now_ns()}, locked);
  TORCH_CHECK(arm == arm_, messages::given_up(where(-1)));
}

}  // namespace ddp_lab
