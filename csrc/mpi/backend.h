// The c10d backend "mpi": collectives of CPU tensors through the MPI library of this machine.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "mpi/progress.h"

namespace ddp_lab::mpi {

class Backend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Pointer = c10::intrusive_ptr<c10d::Work>;

  // The group of these ranks of MPI_COMM_WORLD, in this order; all of them make it.
  static c10::intrusive_ptr<Backend> create(const std::vector<int>& ranks);

  Backend(int rank, int size, std::shared_ptr<Lane> lane);

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return given_; }

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Pointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Pointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Pointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Pointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Pointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Pointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  Pointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Pointer send(Tensors& tensors, int rank, int tag) override;
  Pointer recv(Tensors& tensors, int rank, int tag) override;
  Pointer recvAnysource(Tensors& tensors, int tag) override;
  Pointer barrier(const c10d::BarrierOptions& options) override;

  void abort() override;

 private:
  using Start = std::function<Requests()>;
  using Finish = std::function<void(const Statuses&)>;

  Pointer give(c10d::OpType kind, const char* title, const Tensors& inputs, Tensors outputs,
               std::chrono::milliseconds timeout, Start start, Finish finish = nullptr);
  void give_aside(c10::intrusive_ptr<Work> work, Start start, Finish finish = nullptr);
  Pointer receive(c10d::OpType kind, const char* title, Tensors& tensors, int source, int tag);
  Pointer scatter_sum(c10d::OpType kind, const char* title, const Tensors& inputs, const at::Tensor& whole,
                      const at::Tensor& output, const c10d::ReduceScatterOptions& options);
  void check_root(std::int64_t root, const char* what) const;
  void check_peer(int peer, const char* what) const;
  void check_count(std::size_t found, const char* what) const;

  const std::shared_ptr<Lane> lane_;
  std::atomic<std::uint64_t> given_ = 0;
  std::atomic<std::chrono::milliseconds> timeout_{std::chrono::minutes(30)};  // torch's own for MPI
};

}  // namespace ddp_lab::mpi
