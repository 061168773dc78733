// Reducer: averages the gradients of one model over the ranks of a process group, bucket by bucket, while the
// backward is still running.
//
// The way of a gradient: Reducer::arm (forward's end) -> Reducer::on_grad_ready (autograd's threads) ->
// Backward::copy_in -> mark_ready -> launch -> Reduction::start, comm hook or all_reduce -> Reducer::finalize (end of
// the backward) -> Backward::reduce, in bucket order -> copy_out.
//
// Here are the calls from outside, and the mutex that guards all members: a call takes it and lets them do the work.
// How long what they hold lives: Backward, one backward; BucketSet, one assignment; Reduction, one group and one hook;
// the others, the model.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "record/recorder.h"
#include "reduce/autograd_hooks.h"
#include "reduce/backward.h"
#include "reduce/breakpoints.h"
#include "reduce/bucket_set.h"
#include "reduce/gradient_watch.h"
#include "reduce/inspection.h"
#include "reduce/reduction.h"
#include "reduce/step_report.h"
#include "reduce/unused_parameters.h"

namespace ddp_lab {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  using Assignment = BucketSet::Assignment;
  using Mutex = PauseGate::Mutex;
  using Lock = PauseGate::Lock;

  // What the last backward has averaged, by bucket and slot; keeps the next one from writing to it.
  struct Averages {
    std::int64_t step = 0;
    std::vector<std::vector<at::Tensor>> buckets;
    Lock lock;  // goes first: to let the last reference to a tensor go may need the GIL
  };

  struct Report {
    std::int64_t iteration = 0;  // forwards outside no_sync that have begun
    std::size_t unused_bytes = 0, buckets_reduced = 0;
    std::vector<std::size_t> ready_order;  // parameters with a gradient, of the last backward that finished
    std::string error;                     // the last one raised; empty: none
    StepTimes times;
  };

  // Where the backward stands, or the last one stood.
  struct Stage {
    std::int64_t step = 0;
    std::uint16_t generation = 0;
    bool in_flight = false, finalizing = false;
    std::vector<BucketReport> buckets;
    std::vector<std::size_t> missing;  // parameters whose gradient has not arrived, in bucket order
    std::optional<Breakpoints::Pause> pause;
  };

  Reducer(std::vector<at::Tensor> parameters, const Assignment& assignment, GroupPointer group, EventOrigin origin,
          ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Begins a forward whose backward will be synchronised (`sync`) or not. Discards a backward that an
  // exception ended. Throws if the last one left parameters without a gradient. Returns true, and has not
  // begun, if rebuild() is to be called first.
  bool begin_forward(bool sync);
  // At the end of a forward of parameters that are those of the module themselves: see [Note: accumulators that are
  // replaced].
  void follow_accumulators();
  void end_forward() {
    locked([&] { backward_.end_forward(); });
  }
  // The next backward synchronises gradients, if `sync`. `outputs`: the tensors that forward returned.
  void arm(const std::vector<at::Tensor>& outputs, bool sync = true);
  // Whether gradients may be reduced where they are, see [Note: reduced in place].
  bool sums_pieces() const noexcept { return reduction_.sums_pieces(); }
  // What autograd calls when it has accumulated a gradient; `arrived`: what was accumulated.
  void on_grad_ready(std::size_t parameter, const at::Tensor& arrived = {});

  // Parameters in the order in which their gradients became ready in the last finished backward.
  std::vector<std::size_t> ready_order() const { return last_.order(); }
  bool rebuild_due() const;
  void rebuild(const Assignment& assignment);

  // One backward without autograd: averages the gradients that have accumulated under no_sync. Parameters without one
  // count as unused. All ranks.
  void synchronize();
  // A rank without inputs takes part in one backward of the others: with zeros, and keeps its own gradients.
  void shadow_backward();
  // Such a rank has seen no gradient, yet may be the one whose order counts: that of registration.
  void mark_all_ready();
  // `work` sums ones over the ranks that still have inputs; its result divides the next gradients, unless they
  // are to be divided by the world size.
  void set_forward_pass_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial_world_size);
  // Waited for at the end of the next backward.
  void install_post_backward_futures(std::vector<FuturePointer> futures) {
    locked([&] { reduction_.set_futures(std::move(futures)); });
  }

  // See [Note: a backward that the caller ends].
  void require_manual_end(bool required);
  bool ends_after_backward() const;
  void end_manually();
  // Throws if a backward is over but for end_manually().
  void check_ended() const;

  // See [Note: gradients that nothing has averaged].
  bool in_doubt() const;
  std::vector<std::size_t> unaveraged() const;
  void forget_unaveraged() {
    locked([&] { unaveraged_.parameters.clear(); });
  }

  // Whether the training thread is inside no_sync().
  void set_no_sync(bool inside) { write(no_sync_.inside, inside); }
  // True once after a synchronised backward that began inside no_sync(), which has no effect there.
  bool take_no_sync_warning();

  // Forgets a backward that will not finish, so that the next forward starts clean. Any thread. If that backward
  // runs on after all, it ends with an exception.
  void abandon();
  // A gradient has arrived, and the backward has not been finalized.
  bool in_flight() const { return read(phase()).in_flight(); }

  // See [Note: pausing a backward]. `check` is called now and then during a pause, and may throw.
  Breakpoints& breakpoints() noexcept { return gate_.breakpoints(); }
  void set_pause_check(std::function<void()> check) {
    locked([&] { gate_.set_check(std::move(check)); });
  }
  Stage stage() const;
  // In the next synchronised backward the reducer does not hear of this gradient: see [Note: an injected fault].
  void drop_next(std::size_t parameter);
  // How many synchronised backwards have ended: equal on all ranks, unlike step(), which counts broken ones.
  std::int64_t finished() const { return read(finished_); }
  void set_finished(std::int64_t finished) { write(finished_, finished); }

  void set_comm_hook(HookPointer hook);
  // The plain average again. The thread that trains, between two backwards.
  void clear_comm_hook();
  void set_builtin_hook(c10d::BuiltinCommHookType kind);
  // The comm hook, or the sum over the ranks, of a bucket that the caller made.
  FuturePointer run_comm_hook(std::unique_ptr<GradBucket> bucket);
  FuturePointer run_all_reduce(c10d::GradBucket& bucket);
  // Points at another group and goes back to `assignment` until the next first backward.
  void update_process_group(GroupPointer group, std::int32_t index, const Assignment& assignment);
  void remove_hooks();
  // Optimizers run as soon as a gradient is averaged and drop it: an absent one stays absent. Empty: all parameters.
  void set_optimizer_in_backward(const std::vector<std::size_t>& parameters);
  // Gradients will be of this type: mixed precision trains with copies of the parameters.
  void set_gradient_dtype(at::ScalarType dtype);
  // Rows of a sparse gradient, by parameter name: see [Note: known rows].
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& metadata) {
    locked([&] { buckets_.set_sparse_metadata(metadata); });
  }
  // The graph never changes: see [Note: static graph]. Before the first synchronised forward.
  void set_static_graph();

  // Index of the coming (or running) synchronised backward.
  std::int64_t step() const { return read(origin_.step); }
  void set_step(std::int64_t step) { write(origin_.step, step); }
  std::uint16_t generation() const { return read(origin_.generation); }
  void set_generation(std::uint16_t generation) { write(origin_.generation, generation); }
  // Of the buckets in the last backward that finished.
  std::vector<BucketReport> times() const { return last_.buckets(); }
  Report report() const;
  void set_error(std::string text) { last_.set_error(std::move(text)); }
  // With find_unused_parameters.
  bool graph_was_static() const {
    return locked([&] { return use_.always_same(); });
  }
  at::Tensor used_map() {
    return locked([&] { return use_.here.tensor(); });
  }

  // See [Note: inspecting gradients]
  // What each bucket's parameters have in `.grad`; nothing during a backward. The thread that trains alone.
  std::optional<Inspections> inspect_gradients() const;
  // What the last synchronised backward has averaged, if it is still there. Any thread that has the GIL.
  std::optional<Averages> averages() const;
  void request_inspection(std::int64_t from) noexcept { inspector_.request(from); }
  bool inspection_pending() const noexcept { return inspector_.pending(); }
  void set_inspection_callback(Inspector::Callback callback) {
    locked([&] { inspector_.set_callback(std::move(callback)); });
  }
  // See [Note: watching gradients]; null: no longer. Not during a backward.
  void set_gradient_watch(std::shared_ptr<GradientWatch> watch);

 private:
  // What `work` returns, done under the mutex.
  template <typename Work>
  auto locked(const Work& work) const -> decltype(work()) {
    const Lock lock(mutex_);
    return work();
  }
  template <typename T>
  T read(const T& member) const {
    return locked([&] { return member; });
  }
  template <typename T>
  void write(T& member, T value) {
    locked([&] { member = value; });
  }
  const Phase& phase() const noexcept { return backward_.phase(); }
  [[noreturn]] void fail(const std::string& message);
  [[noreturn]] void fail_unfinished();
  void on_output_gradient(std::uint64_t epoch);
  void on_old_accumulator(std::size_t parameter);
  void warn_of_no_gradient();
  void say_warnings(Lock& lock);
  void begin_backward(std::int64_t now, bool in_flight = true);
  void enter_task(bool by_output);
  void end_of_task(int task, std::uint64_t number);
  void finalize(Lock& lock);
  void tell_watch(Lock& lock, std::int64_t step);
  void abandon_backward(bool by_caller = false);
  void assign(const Assignment& assignment);

  struct NoSync {
    bool inside = false;
    bool in_vain = false;  // a synchronised backward began inside
    bool warned = false;
  };

  // [Note: gradients that nothing has averaged]
  // They have arrived since the last synchronised backward, though no forward outside no_sync announced them: the
  // wrapped module was called in the model's place, say, or another backward followed the synchronised one. As long as
  // there are such gradients, or a backward has begun that has not ended, an optimizer step that uses them moves the
  // ranks' models apart: Python's `step_check` asks after each.
  struct Unaveraged {
    bool wanted = false;           // since the last synchronised backward a forward ran under no_sync
    bool warned_of_none = false;   // a backward reached outputs and no parameter
    std::vector<bool> parameters;  // empty: none

    void add(std::size_t parameter, std::size_t of) {
      if (wanted) return;
      parameters.resize(of);
      parameters[parameter] = true;
    }
    void clear() {
      parameters.clear();
      wanted = false;
    }
  };

  const std::vector<at::Tensor> parameters_;
  ReducerOptions options_;
  mutable Mutex mutex_;
  std::shared_ptr<GradientWatch> watch_;
  std::int64_t finished_ = 0;
  std::int64_t iteration_ = 0;
  std::int64_t joined_iteration_ = 0;  // the last one that ranks without inputs shadow
  bool manual_ = false;                // see [Note: a backward that the caller ends]
  bool order_known_ = false;           // in which gradients become ready: not after a static graph's first backward
  Unaveraged unaveraged_;
  NoSync no_sync_;
  EventOrigin origin_;
  PauseGate gate_{mutex_};
  Reduction reduction_;
  ParameterUse use_;
  BucketSet buckets_;
  Backward backward_;
  AutogradHooks hooks_;
  Inspector inspector_;
  LastStep last_;
};

}  // namespace ddp_lab
