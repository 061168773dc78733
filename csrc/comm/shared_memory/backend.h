// The c10d backend "shm": collectives through shared memory for the CPU ranks of one host. What it does not do itself
// goes to a Gloo group of the same ranks: sending and receiving, uneven sizes, sparse tensors.
//
// Owners: the queue and `executing_` belong to `mutex_`; the group to the thread that executes, which is the worker, or
// the caller of an operation that it waits for anyway, if nothing is queued: that saves two switches between threads.
//
// [Note: operations in callbacks]
// What is chained to a future runs on the worker, and may call further operations and wait for them (PowerSGD does).
// They run at once, before what is queued: the same place in all ranks' order that they have where the future had ended
// before anything was chained to it, and the caller itself calls them. Where one waits for a work that is still queued,
// the worker executes the queue first.
//
// [Note: who holds an interrupt]
// An interrupt is a Python exception: by its traceback it holds the frames that it went through, and so what called the
// operation: the work, and the group. A work that held it would be held by itself, in a circle that Python's collector
// can't see. So the caller gets the interrupt, and the work an error in words.
#pragma once

#include <ATen/ATen.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/piecewise.h"
#include "comm/shared_memory/group.h"
#include "comm/shared_memory/work.h"

namespace ddp_lab::shared_memory {

class Backend : public c10d::Backend, public PiecewiseBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Pointer = c10::intrusive_ptr<c10d::Work>;

  Backend(std::unique_ptr<Group> group, c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  std::chrono::milliseconds timeout();
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override;

  // See [Note: tensors that other ranks read].
  bool supportsTensorAlloc(c10::DeviceIndex) override { return group_->has_pools(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Pointer sum_pieces(const at::Tensor& like, std::vector<SumPiece> pieces, double factor, Tensors kept) override;
  Pointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Pointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Pointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Pointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Pointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  Pointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  Pointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Pointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Pointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  Pointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  Pointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Pointer send(Tensors& tensors, int rank, int tag) override;
  Pointer recv(Tensors& tensors, int rank, int tag) override;
  Pointer recvAnysource(Tensors& tensors, int tag) override;
  Pointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override;

  void abort() override;

  // Whether every operation fails from now on.
  bool broken() const { return group_->broken(); }

 private:
  struct Task {
    std::function<void(const Patience&)> run;
    c10::intrusive_ptr<Work> work;
    std::chrono::milliseconds timeout;
    std::uint64_t flight = 0;
  };

  // Runs `operation` in its turn.
  Pointer give(c10d::OpType kind, const char* title, const Tensors& inputs, Tensors outputs,
               std::chrono::milliseconds timeout, bool asynchronous, std::function<void(const Patience&)> operation);
  // A profile shows the tensors `shown`.
  Pointer exchange(const char* title, const Tensors& shown, Tensors inputs, Tensors outputs, Tensors result,
                   const c10d::AllToAllOptions& options);
  Pointer forwarded(c10d::OpType kind, const char* title, const Tensors& inputs, Pointer work) const;
  // Returns the interrupt that ended it, for who called it.
  std::exception_ptr execute(Task& task, bool interruptible);
  void serve();
  void execute_first(std::unique_lock<std::mutex>& lock);

  std::unique_ptr<Group> group_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  const int pid_;
  const std::uint64_t made_;  // its number among the groups of this process

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool executing_ = false;
  bool stopping_ = false;
  std::uint64_t given_ = 0;
  std::chrono::milliseconds timeout_;
  std::thread worker_;  // started with the first operation that nobody waits for
};

}  // namespace ddp_lab::shared_memory
