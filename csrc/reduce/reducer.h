// Reducer: averages the gradients of one model over the ranks of a process group, bucket by bucket, while the
// backward is still running.
//
// The way of a gradient: arm (forward's end) -> on_grad_ready (autograd's threads) -> Bucket::copy_in ->
// BucketSchedule::mark_ready -> launch -> comm hook or all_reduce -> finalize (end of the backward, waits in
// bucket order) -> Bucket::copy_out.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "record/event.h"
#include "reduce/autograd_node.h"
#include "reduce/bucket.h"
#include "reduce/bucket_schedule.h"
#include "reduce/comm_hook.h"
#include "reduce/device_spans.h"
#include "reduce/inspection.h"

namespace ddp_lab {

struct ReducerOptions {
  bool gradient_as_bucket_view = false;
  std::int32_t reducer_id = -1;           // the same on all ranks
  std::int32_t process_group_index = -1;  // of this rank
  std::vector<std::string> names;         // qualified, in the order of registration
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // assignment[b]: the parameters of bucket b, as indices in the order of registration.
  using Assignment = std::vector<std::vector<std::size_t>>;
  using Inspections = std::vector<Inspection>;

  // Of one bucket in the last backward that finished: host time in ns, 0 if there was none.
  struct Times {
    std::int64_t backward_begin = 0, first_ready = 0, ready = 0, launched = 0, reduced = 0, backward_end = 0;
  };

  Reducer(std::vector<at::Tensor> parameters, const Assignment& assignment, GroupPointer group, ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Begins a forward whose backward will be synchronised (`sync`) or not. Discards a backward that an
  // exception ended. Throws if the last one left parameters without a gradient. Returns true, and has not
  // begun, if rebuild() is to be called first.
  bool begin_forward(bool sync);
  void end_forward();
  // The next backward synchronises gradients. `outputs`: the tensors that forward returned.
  void arm(const std::vector<at::Tensor>& outputs);

  // Parameters in the order in which their gradients became ready in the first synchronised backward.
  std::vector<std::size_t> ready_order() const;
  void rebuild(const Assignment& assignment);

  // Forgets a backward that will not finish, so that the next forward starts clean. Any thread. If that backward
  // runs on after all, it ends with an exception.
  void abandon();
  bool in_flight() const;  // a gradient has arrived, and the backward has not been finalized

  void set_comm_hook(HookPointer hook);
  // Points at another group and goes back to `assignment` until the next first backward.
  void update_process_group(GroupPointer group, std::int32_t index, const Assignment& assignment);
  void remove_hooks();

  std::int64_t step() const;  // index of the coming (or running) synchronised backward
  void set_step(std::int64_t step);
  std::uint16_t generation() const;
  std::vector<Times> times() const;

  // Norm and checksum of each bucket's gradients; nothing while a forward or backward is under way (unless
  // `anyway`, for the thread that trains) or another thread uses the reducer.
  // Call it with the GIL held: Python may not replace a gradient meanwhile.
  std::optional<std::vector<std::vector<at::Tensor>>> gradients_to_inspect(bool anyway) const;
  // At the end of the first backward from step `from` on, `callback(step, inspections)` is called there.
  void request_inspection(std::int64_t from) noexcept { inspect_from_ = from; }
  bool inspection_pending() const noexcept { return inspect_from_ != kNoInspection; }
  void set_inspection_callback(std::function<void(std::int64_t, const Inspections&)> callback);

 private:
  using Mutex = std::recursive_mutex;  // a comm hook may ask the model about its buckets
  using Lock = std::unique_lock<Mutex>;
  static constexpr std::int64_t kNoInspection = std::numeric_limits<std::int64_t>::max();
  static constexpr int kNoTask = -1;

  struct Place {
    std::uint32_t bucket = 0;
    std::uint32_t slot = 0;
    std::uint64_t arrived = 0;  // the arm in which its gradient arrived last
    std::int64_t bytes = 0;
  };

  void add_hooks();
  void assign(const Assignment& assignment);
  void on_grad_ready(std::size_t parameter);
  void on_output_gradient(std::uint64_t arm);
  void check_gradient(std::size_t parameter, const at::Tensor& gradient) const;
  void enter_task();
  void end_of_task(int task, std::uint64_t arm);
  void launch(std::size_t bucket);
  void finalize(Lock& lock);
  void collect(std::size_t bucket);
  void finish_backward();
  void abandon_backward();
  void begin_backward(std::int64_t now);
  DeviceSpans* spans_of(const Bucket& bucket);
  std::string unfinished_message() const;

  Event event(Kind kind, std::int64_t host_ns = 0) const;

  const std::vector<at::Tensor> parameters_;
  const ReducerOptions options_;
  GroupPointer group_;
  std::int32_t group_index_;
  HookPointer hook_;
  std::function<void(std::int64_t, const Inspections&)> inspection_callback_;

  std::vector<std::pair<NodePointer, std::uintptr_t>> hooks_;
  std::vector<std::pair<c10::Device, std::unique_ptr<DeviceSpans>>> spans_;

  mutable Mutex mutex_;
  BucketSchedule schedule_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<Launched> launched_;
  std::vector<Place> places_;  // by parameter
  std::vector<std::size_t> order_;
  std::vector<Times> times_;

  std::vector<int> tasks_;  // autograd's graph tasks that have brought gradients and have not ended
  int last_task_ = kNoTask;
  std::uint64_t arm_ = 0;
  std::uint64_t given_up_ = 0;  // the arm of which abandon() was called
  std::int64_t step_ = 0;
  std::int64_t backward_begin_ = 0;
  std::uint16_t generation_ = 0;
  bool armed_ = false;
  bool in_flight_ = false;
  bool finalizing_ = false;
  bool busy_ = false;  // between the begin of a forward and the end of its backward
  bool rebuilt_ = false;
  std::atomic<std::int64_t> inspect_from_{kNoInspection};
};

}  // namespace ddp_lab
