#include "reduce/reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "reduce/warnings.h"

namespace ddp_lab {

Reducer::Reducer(std::vector<at::Tensor> parameters, const Assignment& assignment, GroupPointer group,
                 EventOrigin origin, ReducerOptions options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      origin_(origin),
      reduction_(std::move(group)),
      use_(parameters_.size(), parameters_.at(0).device()),
      buckets_(assignment, parameters_, options_, reduction_),
      backward_(assignment, parameters_, options_, origin_, watch_, reduction_, use_, buckets_, gate_) {
  last_.assign(buckets_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.add(parameters_[i], [this, i](const torch::autograd::variable_list& arrived) {
      on_grad_ready(i, arrived.empty() ? at::Tensor() : arrived[0]);
    });
  }
  if (options_.find_unused_parameters) use_.search(hooks_.accumulators());
  if (options_.static_graph) use_.set_static_graph();
}

Reducer::~Reducer() { remove_hooks(); }

void Reducer::remove_hooks() {
  const Lock lock(mutex_);
  use_.stop_search();  // it knows the nodes by their addresses
  hooks_.remove();
}

void Reducer::fail(const std::string& message) {
  set_error(message);
  TORCH_CHECK(false, message);
}

// ---- a backward that autograd runs

bool Reducer::begin_forward(bool sync) {
  const Lock lock(mutex_);
  if (phase().awaits_caller()) fail(messages::not_ended(backward_.where()));
  if (phase().in_flight() && torch::autograd::get_current_graph_task_id() == -1) {
    // A graph task that never reached its end was stopped by an exception.
    if (backward_.failed()) {
      abandon_backward();
    } else if (sync) {
      fail_unfinished();
    }
  }
  if (rebuild_due()) return true;
  if (sync) ++iteration_;
  unaveraged_.wanted = unaveraged_.wanted || !sync;
  backward_.begin_forward(sync);
  return false;
}

void Reducer::follow_accumulators() {
  const Lock lock(mutex_);
  if (phase().in_flight()) return;
  const auto on_old = [self = weak_from_this()](std::size_t parameter) {
    if (const auto reducer = self.lock()) reducer->on_old_accumulator(parameter);
  };
  if (hooks_.follow(parameters_, on_old) && use_.searches()) use_.search(hooks_.accumulators());
}

void Reducer::on_old_accumulator(std::size_t parameter) {
  const Lock lock = gate_.enter();
  if (hooks_.empty() || !phase().armed()) return;
  fail(messages::old_accumulator(backward_.where(), options_.names[parameter]));
}

// See [Note: the same error on every rank]
void Reducer::fail_unfinished() {
  std::vector<std::size_t> missing = backward_.missing();
  std::sort(missing.begin(), missing.end());
  const bool is_static = use_.static_graph() != nullptr;
  const std::string message = messages::unfinished(backward_.where(), options_.names, missing, is_static);
  backward_.share_error(message);
  abandon_backward();
  fail(message);
}

void Reducer::arm(const std::vector<at::Tensor>& outputs, bool sync) {
  Lock lock(mutex_);
  if (hooks_.empty() || phase().in_flight() || !sync)
    return;  // in flight: a forward inside the backward, as activation checkpointing runs it
  backward_.arm_after(outputs);
  AutogradHooks::watch(outputs, [self = weak_from_this(), epoch = hooks_.epoch()] {
    if (const auto reducer = self.lock()) reducer->on_output_gradient(epoch);
  });
  say_warnings(lock);
}

// [Note: which backward is synchronised]
// The first one after a forward outside no_sync, whatever it starts from: such a forward arms the reducer. Afterwards
// gradients only accumulate, but for one case: the backward passes through an output of such a forward again (the graph
// was retained) or for the first time (two forwards, then two backwards). Then the outputs' hooks arm the reducer anew.
// That averages what has accumulated as a whole, and is right because the average of equal gradients is themselves:
// avg(avg(g1) + g2) = avg(g1 + g2). Inside no_sync() nothing is armed anew, since the user has asked for it; inside
// join() it is refused, because ranks that have run out of inputs take part in one backward for each forward.
void Reducer::on_output_gradient(std::uint64_t epoch) {
  Lock lock = gate_.enter();
  if (hooks_.empty() || epoch != hooks_.epoch() || phase().finalizing()) return;
  if (!hooks_.gradients_wanted(options_.names, /*may_warn=*/!no_sync_.inside)) return say_warnings(lock);
  if (phase().awaits_caller()) fail(messages::not_ended(backward_.where()));
  if (!phase().armed()) {
    if (no_sync_.inside) return;
    if (joined_iteration_ == iteration_) fail(messages::second_while_joined(backward_.where()));
    backward_.arm(/*rearmed=*/true);
  }
  enter_task(/*by_output=*/true);
  begin_backward(now_ns(), /*in_flight=*/backward_.flushes());
}

void Reducer::on_grad_ready(std::size_t parameter, const at::Tensor& arrived) {
  const std::int64_t now = now_ns();
  const Lock lock = gate_.enter();
  if (phase().armed() && gate_.drops(parameter)) return;
  try {
    const Event event = backward_.on_gradient(parameter, now);
    if (!phase().armed()) {  // the gradient only accumulates
      if (!no_sync_.inside) unaveraged_.add(parameter, parameters_.size());
      return recorder().record(event);
    }
    if (phase().awaits_caller()) fail(messages::not_ended(backward_.where()));
    enter_task(/*by_output=*/false);
    begin_backward(now);
    backward_.accept_gradient(parameter, event, arrived);
  } catch (const c10::Error& error) {
    set_error(error.what_without_backtrace());
    throw;
  }
}

void Reducer::begin_backward(std::int64_t now, bool in_flight) {
  if (backward_.begin(now, in_flight)) no_sync_.in_vain = no_sync_.in_vain || no_sync_.inside;
}

// See [Note: the end of a backward] and [Note: a backward after one that failed]
void Reducer::enter_task(bool by_output) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (backward_.tasks.failed(task)) {
    if (phase().in_flight()) fail(messages::after_failure(backward_.where()));
    backward_.restart();
  }
  if (!backward_.tasks.enter(task, by_output)) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), alive = backward_.tasks.hold_last(), task, number = backward_.number()] {
        self->end_of_task(task, number);
      });
}

void Reducer::end_of_task(int task, std::uint64_t number) {
  Lock lock = gate_.enter();
  TORCH_CHECK(!backward_.given_up(number), messages::given_up(backward_.where(-1)));
  if (number != backward_.number() || !backward_.tasks.leave(task)) return;
  if (phase().armed() && !phase().in_flight()) {
    warn_of_no_gradient();
    return say_warnings(lock);
  }
  if (!phase().in_flight() || phase().finalizing() || !backward_.flush()) return;
  if (manual_) return backward_.await_caller();
  finalize(lock);
}

void Reducer::warn_of_no_gradient() {
  const auto trained = [](const at::Tensor& parameter) { return parameter.requires_grad(); };
  if (unaveraged_.warned_of_none || std::none_of(parameters_.begin(), parameters_.end(), trained)) return;
  unaveraged_.warned_of_none = true;
  warnings().add(messages::no_gradient(backward_.where()));
}

void Reducer::say_warnings(Lock& lock) {
  if (!warnings().waiting()) return;
  lock.unlock();
  warnings().say();
  lock.lock();
}

void Reducer::finalize(Lock& lock) {
  const at::NoGradGuard no_grad;
  backward_.begin_finalize();
  // While this thread waits for the other ranks, others may look at the reducer.
  lock.unlock();
  try {
    backward_.reduce();
  } catch (const std::exception& error) {
    const std::string shared = backward_.error_elsewhere();
    lock.lock();
    abandon_backward();
    set_error(shared.empty() ? error.what() : shared);
    if (!shared.empty()) fail(shared);
    throw;
  }
  lock.lock();
  backward_.end(last_);
  ++finished_;
  order_known_ = order_known_ || !backward_.learns();
  unaveraged_.clear();
  const std::int64_t step = origin_.step++;
  if (const Inspector::Callback callback = inspector_.take(step)) callback(step, buckets_.inspect(step));
  backward_.release_buffers();
  tell_watch(lock, step);
  say_warnings(lock);
}

// See [Note: watching gradients].
void Reducer::tell_watch(Lock& lock, std::int64_t step) {
  if (!watch_ || !watch_->due(step)) return;
  const std::shared_ptr<GradientWatch> watch = watch_;
  const GradientWatch::Found found = watch->collect(last_.order());
  lock.unlock();
  const std::string text = watch->tell(step, found);
  lock.lock();
  if (!text.empty()) fail(text);
}

void Reducer::abandon() {
  gate_.breakpoints().end("the backward was abandoned (abandon_backward) while it was paused at a breakpoint");
  const Lock lock(mutex_);
  if (phase().finalizing()) return;  // the thread that waits does it, as soon as its wait fails
  abandon_backward(/*by_caller=*/true);
}

void Reducer::abandon_backward(bool by_caller) {
  if (backward_.abandon(by_caller)) ++origin_.step;
  hooks_.forget_outputs();
}

// ---- backwards that no gradient brings

// [Note: join]
// Ranks that have run out of inputs go on taking part in the collectives of the others, or these would wait forever.
// For a backward that means: the same buckets through the same hook or all_reduce, in the same order, filled with
// zeros, and the sum over used parameters if the others make it. The averages that come back are for the others; the
// own gradients stay as the last own backward left them. The divisor is the number of ranks that still have inputs,
// which the forward sums up asynchronously and the first gradient waits for, or the world size, as the user chose.
void Reducer::shadow_backward() {
  Lock lock(mutex_);
  TORCH_CHECK(!phase().in_flight(), "a rank that has joined can't have a backward of its own in progress");
  const at::NoGradGuard no_grad;
  const BucketSet::Zeros zeros(buckets_);
  backward_.arm(/*rearmed=*/false, /*shadow=*/true);
  begin_backward(now_ns());
  for (std::size_t parameter = 0; parameter < parameters_.size(); ++parameter) backward_.mark_ready(parameter);
  finalize(lock);
}

void Reducer::synchronize() {
  Lock lock(mutex_);
  TORCH_CHECK(!phase().in_flight(), "gradients can't be synchronised during a backward");
  backward_.arm(/*rearmed=*/true);
  begin_backward(now_ns());
  for (std::size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (parameters_[parameter].grad().defined()) use_.here.mark(parameter);
  }
  backward_.flush();
  finalize(lock);
}

void Reducer::mark_all_ready() {
  const Lock lock(mutex_);
  if (buckets_.rebuilt || last_.ready() != 0) return;
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  last_.set_order(std::move(order));
}

void Reducer::set_forward_pass_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial_world_size) {
  const Lock lock(mutex_);
  reduction_.set_remaining_ranks(divide_by_initial_world_size ? nullptr : std::move(work));
  joined_iteration_ = iteration_ + 1;
}

bool Reducer::take_no_sync_warning() {
  const Lock lock(mutex_);
  if (!no_sync_.in_vain || no_sync_.warned) return false;
  return no_sync_.warned = true;
}

// ---- backwards that the caller ends

// [Note: a backward that the caller ends]
// With `require_manual_backward_finalization` the end of a synchronised backward neither waits for the collectives nor
// writes averages back (`await_caller`): until the caller's finalize_backward() the collectives go on beside whatever
// the caller does, and gradients are what autograd left, or, as bucket views, anything. `end_manually` does then what
// the end of the backward does otherwise. It may also run inside the backward, in a hook, as soon as all buckets are
// launched; the graph tasks of the backward that have not ended are forgotten, since what they bring later belongs to
// no synchronised backward.
// Meanwhile the reducer is in flight: nothing else may begin. A forward, another backward or a change of the model is
// refused, and leaves the averages to be fetched. Backwards without autograd (join, sync_gradients) end by themselves.
void Reducer::require_manual_end(bool required) {
  const Lock lock(mutex_);
  TORCH_CHECK(
      manual_ == required || !phase().armed(),
      "require_manual_backward_finalization cannot be set after forward while a backward pass is expected or in "
      "progress. Set it before the forward, or after finalize_backward().");
  manual_ = required;
}

// Not known before the end of the backward: whether all gradients have arrived, or in which order they will from now
// on.
bool Reducer::ends_after_backward() const {
  const Lock lock(mutex_);
  if (!manual_) return false;
  return backward_.whole() || (use_.searches() ? !use_.searched() : !buckets_.rebuilt);
}

void Reducer::end_manually() {
  Lock lock(mutex_);
  if (!manual_) fail(messages::not_manual());
  if (backward_.last_given_up()) fail(messages::given_up(backward_.where(-1)));
  if (!phase().in_flight() || phase().finalizing()) fail(messages::nothing_to_end(backward_.where()));
  if (!backward_.all_launched()) fail(messages::ended_early(backward_.where(), options_.names, backward_.missing()));
  backward_.tasks.clear();
  finalize(lock);
}

void Reducer::check_ended() const {
  const Lock lock(mutex_);
  TORCH_CHECK(!phase().awaits_caller(), messages::not_ended(backward_.where()));
}

// ---- between two backwards: buckets, group, hook

void Reducer::assign(const Assignment& assignment) {
  backward_.assign(assignment);
  last_.assign(buckets_.size());
}

bool Reducer::rebuild_due() const {
  const Lock lock(mutex_);
  // Parameters that come and go have no order of readiness.
  const bool ordered = !options_.find_unused_parameters || use_.static_graph();
  return ordered && order_known_ && !buckets_.rebuilt && !phase().in_flight() && last_.ready() == parameters_.size();
}

void Reducer::rebuild(const Assignment& assignment) {
  const Lock lock(mutex_);
  TORCH_CHECK(!phase().in_flight(), "buckets can't be rebuilt during a backward");
  assign(assignment);
  buckets_.rebuilt = true;
  ++origin_.generation;
  recorder().record(origin_.event(Kind::kRebuilt));
}

void Reducer::update_process_group(GroupPointer group, std::int32_t index, const Assignment& assignment) {
  const Lock lock(mutex_);
  TORCH_CHECK(!phase().finalizing(), "the process group can't be replaced while a backward waits for it");
  abandon_backward();
  // The old group is let go outside the lock: its threads may take a while to end.
  reduction_.swap_group(group);
  origin_.process_group = index;
  buckets_.rebuilt = order_known_ = false;
  last_.set_order({});
  assign(assignment);
  ++origin_.generation;
}

void Reducer::set_gradient_dtype(at::ScalarType dtype) {
  const Lock lock(mutex_);
  TORCH_CHECK(!phase().in_flight(), "the gradients' type can't be set during a backward");
  options_.dtype = dtype;
  assign(buckets_.assignment());
}

void Reducer::set_optimizer_in_backward(const std::vector<std::size_t>& parameters) {
  const Lock lock(mutex_);
  options_.optimized.assign(parameters_.size(), parameters.empty());
  for (const std::size_t parameter : parameters) options_.optimized.at(parameter) = true;
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  TORCH_CHECK(iteration_ == 0,
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed; ",
              iteration_, " forwards have begun");
  use_.set_static_graph();
}

void Reducer::set_comm_hook(HookPointer hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!reduction_.hook(), "register_comm_hook or register_builtin_comm_hook can only be called once.");
  TORCH_CHECK(!phase().in_flight(), "a comm hook can't be registered during a backward");
  reduction_.swap_hook(hook);
}

void Reducer::clear_comm_hook() {
  HookPointer old;  // let go outside the lock: that may need the GIL
  const Lock lock(mutex_);
  TORCH_CHECK(!phase().in_flight(), "a comm hook can't be removed during a backward");
  reduction_.swap_hook(old);
}

void Reducer::set_builtin_hook(c10d::BuiltinCommHookType kind) {
  const Lock lock(mutex_);
  set_comm_hook(make_builtin_hook(kind, reduction_.group()));
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

// ---- questions, and what is told or changed while training runs

Reducer::Report Reducer::report() const {
  const Lock lock(mutex_);
  Report made;
  made.iteration = iteration_;
  const std::vector<std::size_t>& unused = use_.last_unused();
  for (const std::size_t parameter : unused) made.unused_bytes += parameters_[parameter].nbytes();
  made.buckets_reduced = backward_.buckets_reduced();
  for (const std::size_t parameter : last_.order()) {
    if (std::find(unused.begin(), unused.end(), parameter) == unused.end()) made.ready_order.push_back(parameter);
  }
  made.error = last_.error();
  made.times = last_.times();
  return made;
}

Reducer::Stage Reducer::stage() const {
  const Lock lock(mutex_);
  Stage made{origin_.step, origin_.generation, phase().in_flight(), phase().finalizing(), {}, {}, gate_.current()};
  for (std::size_t b = 0; b < buckets_.size(); ++b) made.buckets.push_back(backward_.report_of(b));
  if (made.in_flight) made.missing = backward_.missing();
  return made;
}

std::optional<Inspections> Reducer::inspect_gradients() const {
  const Lock lock(mutex_);
  if (phase().in_flight()) return std::nullopt;
  return buckets_.inspect_gradients();
}

std::optional<Reducer::Averages> Reducer::averages() const {
  Averages found;
  found.lock = Lock(mutex_, std::try_to_lock);
  if (!found.lock.owns_lock()) return std::nullopt;
  const bool changing = backward_.forward_begun() && (options_.gradient_as_bucket_view || sums_pieces());
  found.step = origin_.step - 1;
  if (phase().in_flight() || changing || found.step < 0) return std::nullopt;
  auto averages = buckets_.averages(found.step);
  if (!averages) return std::nullopt;
  found.buckets = std::move(*averages);
  return found;
}

void Reducer::set_gradient_watch(std::shared_ptr<GradientWatch> watch) {
  const Lock lock(mutex_);
  TORCH_CHECK(!phase().in_flight(), "gradient monitoring can't be changed during a backward");
  if (watch) watch->begin(buckets_.size());  // its first backward may be armed
  watch_.swap(watch);
}

bool Reducer::in_doubt() const {
  const Lock lock(mutex_);
  return phase().in_flight() || !unaveraged_.parameters.empty();
}

std::vector<std::size_t> Reducer::unaveraged() const {
  const Lock lock(mutex_);
  std::vector<std::size_t> found;
  for (std::size_t p = 0; p < unaveraged_.parameters.size(); ++p) {
    if (unaveraged_.parameters[p]) found.push_back(p);
  }
  return found;
}

void Reducer::drop_next(std::size_t parameter) {
  const Lock lock(mutex_);
  TORCH_CHECK(parameter < parameters_.size(), "there is no parameter ", parameter);
  gate_.drop_next(parameter);
}

}  // namespace ddp_lab
