// The c10d backend "round_robin": each collective goes to the next of several groups of the same ranks, so that several
// of them are on their way at once. Its Python face is ddp_lab/comm/round_robin.py.
//
// See [Note: turns]. Which group a collective goes to follows from how many came before it, on every rank alike: ranks
// that enter the same collectives in the same order, as they have to on any group, meet in the same groups. Three kinds
// of call stay out of the turns:
// - Sending and receiving go to the first group. Two ranks send and receive without the others, so that the counts of
//   ranks would part; and what a rank sends with one tag has to be found by whoever receives it, from anyone even.
// - A barrier goes to all groups: it ends when all that was given to any of them before is done. It counts as one
//   collective.
// - What is coalesced between startCoalescing and endCoalescing goes to the first group, in one piece.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ddp_lab {

class RoundRobin : public c10d::Backend {
 public:
  using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;
  using Tensors = std::vector<at::Tensor>;
  using Pointer = c10::intrusive_ptr<c10d::Work>;

  // `groups`: at least one; all of the same ranks.
  explicit RoundRobin(Groups groups);

  const std::string getBackendName() const override { return "round_robin"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return given_; }
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  Pointer endCoalescing() override;

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
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

  // Frees whoever waits, in every group. Their end is their owner's: destroying this one leaves them alone.
  void abort() override;

 private:
  using Inner = c10::intrusive_ptr<c10d::Backend>;

  // The backend whose turn it is, for tensors like these.
  Inner next(const Tensors& tensors);
  Inner next(const at::Tensor& tensor);
  // The first group's.
  Inner first(const Tensors& tensors) const;
  // The first group's backend that can coalesce, if it has one.
  Inner coalescing() const;

  const Groups groups_;
  std::atomic<std::uint64_t> given_{0};
  std::atomic<bool> coalescing_{false};
};

}  // namespace ddp_lab
