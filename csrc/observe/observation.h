// Observation: records what torch's reducer does with one model, in the events that our own reducer records.
//
// Hooks tell when a gradient has been accumulated; launches.h tells when a bucket is launched and reduced; the rest is
// known from the order in which autograd calls back. Nothing that torch computes or communicates is changed.
// Guarded by its own mutex, which is let go before the inspection's callback.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "observe/launches.h"
#include "record/recorder.h"
#include "reduce/autograd_hooks.h"
#include "reduce/device_spans.h"
#include "reduce/graph_tasks.h"
#include "reduce/inspection.h"

namespace ddp_lab {

class Observation final : public LaunchListener, public std::enable_shared_from_this<Observation> {
 public:
  using Assignment = std::vector<std::vector<std::size_t>>;

  // The trained parameters that torch's reducer has put into buckets, in bucket order.
  static std::vector<at::Tensor> parameters_of(const c10d::Reducer& reducer);

  // `parameters`: those of parameters_of, in the order of registration.
  Observation(const std::shared_ptr<c10d::Reducer>& reducer, std::vector<at::Tensor> parameters, EventOrigin origin,
              bool static_graph);
  ~Observation() override;
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

  void start();
  void stop();

  // Reads anew what torch's buckets are; `rebuilt`: as a new generation. Not during a backward.
  Assignment read_buckets(bool rebuilt);
  // What the model may have changed since: another group, a graph that was declared static.
  void update(std::int32_t process_group_index, bool static_graph);

  void begin_forward(bool sync);
  // The tensors that forward returned; `sync`: their backward will be synchronised.
  void end_forward(const std::vector<at::Tensor>& outputs, bool sync);
  void on_gradient(std::size_t parameter);

  std::optional<SeenLaunch> launching(const at::Tensor& buffer) override;
  std::optional<SeenLaunch> launching(std::size_t index) override;

  std::int64_t step() const;
  std::uint16_t generation() const;
  void request_inspection(std::int64_t from) noexcept { inspector_.request(from); }
  bool inspection_pending() const noexcept { return inspector_.pending(); }
  void set_inspection_callback(Inspector::Callback callback);

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Bucket {
    std::vector<std::size_t> parameters;
    at::Tensor buffer;  // undefined if its gradient is sparse
    c10::Device device = c10::kCPU;
    std::int64_t bytes = 0;
    std::size_t missing = 0;  // gradients that have not arrived
    std::int64_t last_arrival = 0;
    bool ready = false;
  };

  void begin_backward(std::int64_t now);
  void on_output_gradient(std::uint64_t arm);
  void enter_task();
  void end_of_task(int task, std::uint64_t arm);
  void end_of_backward(std::uint64_t arm);
  bool is_complete(std::size_t parameter);
  void inspect_if_asked(Lock& lock);
  void note_ready(std::size_t bucket, std::int64_t now);
  std::optional<SeenLaunch> launch_next();
  Event new_event(Kind kind, std::int64_t host_ns = 0) const { return origin_.event(kind, host_ns); }

  const std::weak_ptr<c10d::Reducer> reducer_;  // its model's
  const std::vector<at::Tensor> parameters_;
  EventOrigin origin_;
  bool static_graph_;
  AutogradHooks hooks_;
  ModelSpans spans_;

  mutable std::mutex mutex_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;  // by parameter
  // How often each parameter's gradient arrives in a backward of a static graph; empty before the first.
  std::vector<std::uint32_t> expected_;
  std::vector<std::uint32_t> arrivals_;
  std::vector<SeenLaunch> launches_;  // of this backward
  GraphTasks tasks_;                  // listed until the next forward
  std::uint64_t arm_ = 0;
  std::int64_t backward_begin_ = 0;
  bool armed_ = false;  // the next backward is synchronised
  Inspector inspector_;
};

}  // namespace ddp_lab
