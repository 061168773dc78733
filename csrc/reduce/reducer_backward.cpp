// Reducer: where a backward begins and where it ends.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {
// [Note: which backward is synchronised]
// The first one after a forward outside no_sync, whatever it starts from: such a forward arms the reducer. Afterwards
// gradients only accumulate, but for one case: the backward passes through an output of such a forward again (the graph
// was retained) or for the first time (two forwards, then two backwards). Then the outputs' hooks arm the reducer anew.
// That averages what has accumulated as a whole, and is right because the average of equal gradients is themselves:
// avg(avg(g1) + g2) = avg(g1 + g2). Inside no_sync() nothing is armed anew, since the user has asked for it; inside
// join() it is refused, because ranks that have run out of inputs take part in one backward for each forward.
void Reducer::on_output_gradient(std::uint64_t epoch) {
  const Lock lock = gate_.enter();
  if (hooks_.empty() || epoch != hooks_.epoch() || finalizing_) return;
  if (!hooks_.gradients_wanted(options_.names, /*may_warn=*/!no_sync_)) return;
  if (awaiting_) fail(messages::not_ended(where()));
  if (!armed_) {
    if (no_sync_) return;
    if (joined_iteration_ == iteration_) fail(messages::second_while_joined(where()));
    start_backward(true);
  }
  enter_task(true);
  if (flushes()) in_flight_ = true;
  begin_backward(now_ns());
}

void Reducer::begin_backward(std::int64_t now) {
  if (backward_begin_ != 0) return;
  backward_begin_ = now_times_.backward_begin = now;
  no_sync_warning_ = no_sync_warning_ || no_sync_;
  recorder().record(event(Kind::kBackwardBegin, now));
  for (const std::size_t parameter : unused_) {
    marks_[parameter].unused = arm_;
    in_flight_ = true;
  }
  for (const std::size_t parameter : unused_) {
    if (!skips(buckets_.place(parameter).bucket)) copy_in(parameter);  // which divides a gradient that is a view
    mark_ready(parameter);
  }
}

void Reducer::enter_task(bool by_output) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (tasks_.failed(task)) {
    if (in_flight_) fail(messages::after_failure(where()));
    tasks_.clear();
    backward_begin_ = 0;
  }
  if (!tasks_.enter(task, by_output)) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), alive = tasks_.hold_last(), task, arm = arm_] { self->end_of_task(task, arm); });
}

void Reducer::end_of_task(int task, std::uint64_t arm) {
  Lock lock = gate_.enter();
  TORCH_CHECK(arm != given_up_, messages::given_up(where_last()));
  if (arm != arm_ || !tasks_.leave(task) || !in_flight_ || finalizing_) return;
  if (flushes()) flush();
  if (!schedule_.all_launched()) return;
  if (manual_) return await_end();
  finalize(lock);
}

// Such backwards also end with the sum of the used parameters over the ranks. All ranks answer alike.
bool Reducer::flushes() const { return rearmed_ || mode_ == Mode::kWhole || use_.searches(); }

void Reducer::flush() {
  if (mode_ == Mode::kWhole) {  // in the order in which each arrived for the last time
    std::vector<std::size_t> last;
    std::vector<bool> seen(parameters_.size(), false);
    for (auto firing = firings_.rbegin(); firing != firings_.rend(); ++firing) {
      if (!seen[*firing]) last.push_back(*firing);
      seen[*firing] = true;
    }
    for (auto parameter = last.rbegin(); parameter != last.rend(); ++parameter) {
      copy_in(*parameter);
      mark_ready(*parameter);
    }
  }
  if (schedule_.all_launched()) return;
  for (const std::size_t parameter : schedule_.missing()) {
    copy_in(parameter);
    mark_ready(parameter);
  }
}

bool Reducer::errors_are_shared() const { return !reduction_.hook() && buckets_.on_cpu(); }

// See [Note: the same error on every rank]
void Reducer::fail_unfinished() {
  std::vector<std::size_t> missing = schedule_.missing();
  std::sort(missing.begin(), missing.end());
  const std::string message = messages::unfinished(where(), options_.names, missing, use_.static_graph() != nullptr);
  if (errors_are_shared()) {
    std::vector<at::Tensor> unlaunched;
    for (std::size_t b = schedule_.launched(); b < buckets_.size() && !buckets_[b].sparse(); ++b) {
      buckets_[b].hold();
      unlaunched.push_back(buckets_[b].buffer());
    }
    shared_error().raise_everywhere(message, unlaunched);
  }
  abandon_backward();
  fail(message);
}

void Reducer::look_for_error(const at::Tensor& reduced) {
  if (looked_for_error_ || reduction_.hook() || !SharedError::marks(reduced)) return;
  looked_for_error_ = true;
  const std::string found = shared_error().found();
  if (!found.empty()) fail(found);
}

std::string Reducer::error_elsewhere() const { return errors_are_shared() ? shared_error().found() : std::string(); }

void Reducer::finish_backward() {
  finalizing_ = in_flight_ = armed_ = busy_ = awaiting_ = false;
  const Event end = event(Kind::kBackwardEnd, now_ns());
  for (std::size_t b = 0; b < buckets_.size(); ++b) schedule_.mark_reduced(b);
  last_.write(now_times_, order_, [&](std::size_t b) -> BucketReport {
    const BucketTimes& times = *buckets_[b].times;
    return {backward_begin_, times.first_ready, times.ready, times.launched, times.reduced, end.host_ns};
  });
  recorder().record(end);
  use_.here.reset();
  reduction_.end();
  ++finished_;
  const std::int64_t step = origin_.step++;
  if (const Inspector::Callback callback = inspector_.take(step)) callback(step, buckets_.inspect(step));
}

// See [Note: watching gradients].
void Reducer::tell_watch(Lock& lock) {
  const std::int64_t step = origin_.step - 1;
  if (!watch_ || !watch_->due(step)) return;
  const std::shared_ptr<GradientWatch> watch = watch_;
  const GradientWatch::Found found = watch->collect(last_.order());
  lock.unlock();
  const std::string text = watch->tell(step, found);
  lock.lock();
  if (!text.empty()) fail(text);
}

void Reducer::abandon() {
  gate_.breakpoints().end("the backward was given up (abandon_backward) while it paused at a breakpoint");
  const Lock lock(mutex_);
  if (finalizing_) return;  // the thread that waits does it, as soon as its wait fails
  if (in_flight_) given_up_ = arm_;
  abandon_backward();
}

void Reducer::abandon_backward() {
  if (in_flight_) {
    recorder().record(event(Kind::kAbandoned));
    ++origin_.step;
    buckets_.abandon(schedule_.launched());
    for (std::size_t b = 0; b < schedule_.launched(); ++b) launched_[b] = Launched{};
    use_.here.abandon();
  }
  armed_ = in_flight_ = busy_ = awaiting_ = graph_changed_ = false;
  tasks_.clear();
  reduction_.end();
  ++arm_;
  hooks_.forget_outputs();
}

}  // namespace ddp_lab
