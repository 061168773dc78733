// Backward: one synchronised backward, from the forward before it to its end. There is one object for all of a model's,
// so that its vectors keep their memory.
// Guarded by Reducer's mutex, but for reduce(): see there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "record/recorder.h"
#include "reduce/breakpoints.h"
#include "reduce/bucket_schedule.h"
#include "reduce/bucket_set.h"
#include "reduce/gradient_access.h"
#include "reduce/gradient_watch.h"
#include "reduce/graph_tasks.h"
#include "reduce/messages.h"
#include "reduce/phase.h"
#include "reduce/reduction.h"
#include "reduce/shared_error.h"
#include "reduce/step_report.h"
#include "reduce/unused_parameters.h"

namespace ddp_lab {

class Backward {
 public:
  // Keeps references to all of them, the reducer's other members.
  Backward(const BucketSet::Assignment& assignment, const std::vector<at::Tensor>& parameters,
           const ReducerOptions& options, const EventOrigin& origin, const std::shared_ptr<GradientWatch>& watch,
           Reduction& reduction, ParameterUse& use, BucketSet& buckets, PauseGate& gate);

  // Between two backwards.
  void assign(const BucketSet::Assignment& assignment);

  void begin_forward(bool sync);
  void end_forward();
  // After a forward that returned these tensors.
  void arm_after(const std::vector<at::Tensor>& outputs);
  // Without a forward of its own; `rearmed`: it reduces what has accumulated; `shadow`: it is the other ranks'.
  void arm(bool rearmed, bool shadow = false);
  // A gradient is known: parameters that it does not reach count as arrived. `in_flight`: it can't be taken back any
  // more. True if it had not begun before.
  bool begin(std::int64_t now, bool in_flight);
  // The tasks that ran it have failed, with nothing sent: another takes its place.
  void restart() {
    tasks.clear();
    begin_ = 0;
  }

  // Autograd has accumulated a gradient, of this backward or not.
  Event on_gradient(std::size_t parameter, std::int64_t now);
  // It is of this one; `event`: what on_gradient() returned.
  void accept_gradient(std::size_t parameter, Event event, const at::Tensor& arrived);
  void mark_ready(std::size_t parameter);
  // All is there that will come. True if all buckets are launched now.
  bool flush();
  // Whether its end is that of the root task, whatever has arrived. Such backwards also end with the sum of the used
  // parameters over the ranks. All ranks answer alike.
  bool flushes() const { return rearmed_ || mode_ == Mode::kWhole || use_.searches(); }
  void await_caller();

  void begin_finalize();
  // Waits for the buckets, in bucket order, and writes the averages back; without the mutex. While the phase says that
  // it runs, buckets, launches, `use` and `reduction` belong to its thread, and other threads may only look.
  void reduce();
  // What made another rank fail, or empty.
  std::string error_elsewhere() const;
  // Tells the ranks that wait for buckets of this one; see [Note: the same error on every rank].
  void share_error(const std::string& message);
  void end(LastStep& last);
  // See [Note: buffers on demand].
  void release_buffers();
  // Forgets it, so that the next forward starts clean; true if it was in flight. `by_caller`: should it run on after
  // all, it is to fail.
  bool abandon(bool by_caller = false);

  const Phase& phase() const noexcept { return phase_; }
  std::uint64_t number() const noexcept { return arm_; }
  bool given_up(std::uint64_t number) const noexcept { return number == given_up_; }
  bool last_given_up() const noexcept { return given_up_ != 0 && given_up_ + 1 == arm_; }
  // An exception has ended it.
  bool failed() const noexcept { return !tasks.empty() && !graph_changed_; }
  // Whether nobody knows before its end that a gradient is complete.
  bool whole() const noexcept { return mode_ == Mode::kWhole; }
  // Whether it is, or was, the first of a static graph.
  bool learns() const noexcept { return mode_ == Mode::kWhole && !rearmed_; }
  bool all_launched() const noexcept { return schedule_.all_launched(); }
  // Parameters without a gradient, in bucket order.
  std::vector<std::size_t> missing() const { return schedule_.missing(); }
  std::size_t buckets_reduced() const noexcept { return buckets_reduced_; }
  BucketReport report_of(std::size_t bucket, std::int64_t end = 0) const;
  // A forward has begun whose backward has not ended, so that gradients that are shared with buffers may change.
  bool forward_begun() const noexcept { return forward_begun_; }
  messages::Where where(std::int64_t steps_on = 0) const {
    return {origin_.step + steps_on, reduction_.group()->getRank(), options_.module};
  }

  GraphTasks tasks;

 private:
  // When gradients are copied into their buckets.
  enum class Mode : std::uint8_t {
    kEager,    // each as soon as it arrives
    kCounted,  // each when it has arrived as often as in the first backward of a static graph
    kWhole     // all at the end
  };

  struct Mark {
    std::uint64_t arrived = 0;  // the arm in which the parameter's gradient arrived last
    std::uint64_t unused = 0;   // the arm in which it was unused last
  };

  bool is_last_arrival(std::size_t parameter);
  void check_gradient(std::size_t parameter, const at::Tensor& gradient) const;
  // See [Note: reduced in place]. False: to be copied in.
  bool take_in_place(std::size_t parameter, const at::Tensor& arrived);
  void copy_in(std::size_t parameter);
  void flush_arrivals();
  void launch(std::size_t bucket);
  bool skips(std::size_t bucket) const;
  void copy_out(std::size_t bucket);
  bool left_alone(std::size_t parameter);
  void look_for_error(const at::Tensor& reduced);
  bool watches() const { return watch_ && watch_->due(origin_.step); }
  bool errors_are_shared() const { return !reduction_.hook() && buckets_.on_cpu(); }
  SharedError shared_error() const { return {*reduction_.group(), origin_.reducer, origin_.step}; }
  // See [Note: pausing a backward]. `locked`: the caller holds the mutex, once.
  void reached(Point point, std::size_t index, bool locked = true) {
    if (gate_.breakpoints().any()) stop(point, index, locked);
  }
  void stop(Point point, std::size_t index, bool locked);

  const std::vector<at::Tensor>& parameters_;
  const ReducerOptions& options_;
  const EventOrigin& origin_;
  const std::shared_ptr<GradientWatch>& watch_;
  Reduction& reduction_;
  ParameterUse& use_;
  BucketSet& buckets_;
  PauseGate& gate_;

  BucketSchedule schedule_;
  std::vector<Launched> launched_;
  std::vector<Mark> marks_;            // by parameter
  GradientAccess access_;              // of the hook that ran last
  std::vector<std::size_t> unused_;    // parameters, ascending: they count as arrived when it begins
  std::vector<std::size_t> arrivals_;  // Mode::kWhole: parameters as their gradients arrived
  std::vector<std::size_t> order_;     // parameters as they became ready
  StepTimes times_;
  Phase phase_;
  Mode mode_ = Mode::kEager;
  bool rearmed_ = false;
  bool shadow_ = false;
  bool graph_changed_ = false;
  bool looked_for_error_ = false;
  bool forward_begun_ = false;
  std::uint64_t arm_ = 0;
  std::uint64_t given_up_ = 0;
  std::int64_t begin_ = 0;
  std::size_t buckets_reduced_ = 0;
};

}  // namespace ddp_lab
