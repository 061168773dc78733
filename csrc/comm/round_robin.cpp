#include "comm/round_robin.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace ddp_lab {

namespace {

using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;
using Inner = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;
using Pointer = c10::intrusive_ptr<c10d::Work>;

// One operation on several groups: done when it is done on all of them.
class AllWorks : public c10d::Work {
 public:
  AllWorks(int rank, c10d::OpType kind, std::vector<Pointer> works)
      : c10d::Work(rank, kind), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }

  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (const std::exception_ptr error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    return std::all_of(works_.begin(), works_.end(), [&](const auto& work) { return work->wait(timeout); });
  }

  void synchronize() override {
    for (const auto& work : works_) {
      work->synchronize();
    }
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : works_) {
      futures.push_back(work->getFuture());
    }
    return c10::collectAll(futures);
  }

 private:
  const std::vector<Pointer> works_;
};

// What answers for calls that come without a tensor; as torch's own barrier chooses.
c10::DeviceType plain_device(c10d::ProcessGroup& group) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const bool has_cpu = std::any_of(devices.begin(), devices.end(), [](const auto& device) { return device.is_cpu(); });
  return has_cpu ? at::kCPU : devices.at(0).type();
}

// Numbers of devices are those of an accelerator.
c10::DeviceType barrier_device(c10d::ProcessGroup& group, const c10d::BarrierOptions& options) {
  if (!options.device_ids.empty()) {
    for (const c10::Device& device : group.getDeviceTypes()) {
      if (!device.is_cpu()) {
        return device.type();
      }
    }
  }
  return plain_device(group);
}

// Each backend once, whatever devices it serves.
std::vector<Inner> backends_of(c10d::ProcessGroup& group) {
  std::vector<Inner> found;
  for (const c10::Device& device : group.getDeviceTypes()) {
    Inner backend = group.getBackend(device.type());
    if (std::find(found.begin(), found.end(), backend) == found.end()) {
      found.push_back(std::move(backend));
    }
  }
  return found;
}

// See [Note: turns] in round_robin.h.
class RoundRobin final : public c10d::Backend {
 public:
  explicit RoundRobin(Groups groups)
      : c10d::Backend(groups.at(0)->getRank(), groups.at(0)->getSize()), groups_(std::move(groups)) {}

  const std::string getBackendName() const override { return "round_robin"; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return given_; }
  bool supportsCoalescing() const override { return coalescing() != nullptr; }

  void startCoalescing() override {
    const Inner backend = coalescing();
    TORCH_CHECK_VALUE(backend, "round_robin: the backend ", first({})->getBackendName(),
                      " of its first group can't coalesce operations");
    backend->startCoalescing();
    coalescing_ = true;
  }

  Pointer endCoalescing() override {
    coalescing_ = false;
    return coalescing()->endCoalescing();
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    for_each_backend([&](c10d::Backend& backend) { backend.setTimeout(timeout); });
  }

  // Frees whoever waits, in every group. Their end is their owner's: destroying this one leaves them alone.
  void abort() override {
    for_each_backend([](c10d::Backend& backend) { backend.abort(); });
  }

  // -- in turn

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return next(tensors)->broadcast(tensors, options);
  }

  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return next(tensors)->allreduce(tensors, options);
  }

  Pointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return next(tensors)->allreduce_sparse(tensors, options);
  }

  Pointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return next(tensors)->allreduce_coalesced(tensors, options);
  }

  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return next(tensors)->reduce(tensors, options);
  }

  Pointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return next(inputs)->allgather(outputs, inputs, options);
  }

  Pointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return next(input)->_allgather_base(output, input, options);
  }

  Pointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return next(inputs)->allgather_coalesced(outputs, inputs, options);
  }

  Pointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return next(inputs)->allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  Pointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return next(inputs)->gather(outputs, inputs, options);
  }

  Pointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return next(outputs)->scatter(outputs, inputs, options);
  }

  Pointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return next(outputs)->reduce_scatter(outputs, inputs, options);
  }

  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return next(output)->_reduce_scatter_base(output, input, options);
  }

  Pointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return next(outputs)->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return next(output)->alltoall_base(output, input, output_sizes, input_sizes, options);
  }

  Pointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return next(outputs)->alltoall(outputs, inputs, options);
  }

  // -- not in turn

  Pointer send(Tensors& tensors, int rank, int tag) override { return first(tensors)->send(tensors, rank, tag); }

  Pointer recv(Tensors& tensors, int rank, int tag) override { return first(tensors)->recv(tensors, rank, tag); }

  Pointer recvAnysource(Tensors& tensors, int tag) override { return first(tensors)->recvAnysource(tensors, tag); }

  Pointer barrier(const c10d::BarrierOptions& options) override {
    ++given_;
    std::vector<Pointer> works;
    for (const auto& group : groups_) {
      if (Pointer work = group->getBackend(barrier_device(*group, options))->barrier(options)) {
        works.push_back(std::move(work));
      }
    }
    return c10::make_intrusive<AllWorks>(rank_, c10d::OpType::BARRIER, std::move(works));
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override {
    first({})->monitoredBarrier(options, wait_for_all);
  }

 private:
  static Inner backend_for(c10d::ProcessGroup& group, const Tensors& tensors) {
    return group.getBackend(tensors.empty() ? plain_device(group) : tensors[0].device().type());
  }

  // The backend whose turn it is, for tensors like these.
  Inner next(const Tensors& tensors) {
    const std::uint64_t turn = given_++;
    return coalescing_ ? first(tensors) : backend_for(*groups_[turn % groups_.size()], tensors);
  }
  Inner next(const at::Tensor& tensor) { return next(Tensors{tensor}); }

  // The first group's.
  Inner first(const Tensors& tensors) const { return backend_for(*groups_[0], tensors); }

  // The first group's backend that can coalesce, if it has one.
  Inner coalescing() const {
    const std::vector<Inner> all = backends_of(*groups_[0]);
    const auto can = [](const Inner& backend) { return backend->supportsCoalescing(); };
    const auto found = std::find_if(all.begin(), all.end(), can);
    return found == all.end() ? Inner() : *found;
  }

  template <typename Function>
  void for_each_backend(Function function) const {
    for (const auto& group : groups_) {
      for (const Inner& backend : backends_of(*group)) {
        function(*backend);
      }
    }
  }

  const Groups groups_;
  std::atomic<std::uint64_t> given_{0};  // gives turns out; publishes nothing
  std::atomic<bool> coalescing_{false};  // set and seen by the thread that calls; others only must not be torn
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_round_robin(Groups groups) {
  return c10::make_intrusive<RoundRobin>(std::move(groups));
}

}  // namespace ddp_lab
