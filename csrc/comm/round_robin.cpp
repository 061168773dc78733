#include "comm/round_robin.h"

#include <algorithm>
#include <utility>

namespace ddp_lab {

namespace {

// One operation on several groups: done when it is done on all of them.
class AllWorks : public c10d::Work {
 public:
  AllWorks(int rank, c10d::OpType kind, std::vector<c10::intrusive_ptr<c10d::Work>> works)
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
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
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
std::vector<c10::intrusive_ptr<c10d::Backend>> backends_of(c10d::ProcessGroup& group) {
  std::vector<c10::intrusive_ptr<c10d::Backend>> found;
  for (const c10::Device& device : group.getDeviceTypes()) {
    c10::intrusive_ptr<c10d::Backend> backend = group.getBackend(device.type());
    if (std::find(found.begin(), found.end(), backend) == found.end()) {
      found.push_back(std::move(backend));
    }
  }
  return found;
}

c10::intrusive_ptr<c10d::Backend> backend_for(c10d::ProcessGroup& group, const RoundRobin::Tensors& tensors) {
  return group.getBackend(tensors.empty() ? plain_device(group) : tensors[0].device().type());
}

}  // namespace

RoundRobin::RoundRobin(Groups groups)
    : c10d::Backend(groups.at(0)->getRank(), groups.at(0)->getSize()), groups_(std::move(groups)) {}

RoundRobin::Inner RoundRobin::next(const Tensors& tensors) {
  const std::uint64_t turn = given_++;
  return coalescing_ ? first(tensors) : backend_for(*groups_[turn % groups_.size()], tensors);
}

RoundRobin::Inner RoundRobin::next(const at::Tensor& tensor) { return next(Tensors{tensor}); }

RoundRobin::Inner RoundRobin::first(const Tensors& tensors) const { return backend_for(*groups_[0], tensors); }

RoundRobin::Inner RoundRobin::coalescing() const {
  for (const Inner& backend : backends_of(*groups_[0])) {
    if (backend->supportsCoalescing()) {
      return backend;
    }
  }
  return nullptr;
}

bool RoundRobin::supportsCoalescing() const { return coalescing() != nullptr; }

void RoundRobin::startCoalescing() {
  const Inner backend = coalescing();
  TORCH_CHECK_VALUE(backend, "round_robin: the backend ", first({})->getBackendName(),
                    " of its first group can't coalesce operations");
  backend->startCoalescing();
  coalescing_ = true;
}

RoundRobin::Pointer RoundRobin::endCoalescing() {
  coalescing_ = false;
  return coalescing()->endCoalescing();
}

void RoundRobin::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto& group : groups_) {
    for (const Inner& backend : backends_of(*group)) {
      backend->setTimeout(timeout);
    }
  }
}

void RoundRobin::abort() {
  for (const auto& group : groups_) {
    for (const Inner& backend : backends_of(*group)) {
      backend->abort();
    }
  }
}

// -- in turn

RoundRobin::Pointer RoundRobin::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return next(tensors)->broadcast(tensors, options);
}

RoundRobin::Pointer RoundRobin::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return next(tensors)->allreduce(tensors, options);
}

RoundRobin::Pointer RoundRobin::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return next(tensors)->allreduce_sparse(tensors, options);
}

RoundRobin::Pointer RoundRobin::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return next(tensors)->allreduce_coalesced(tensors, options);
}

RoundRobin::Pointer RoundRobin::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return next(tensors)->reduce(tensors, options);
}

RoundRobin::Pointer RoundRobin::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  return next(inputs)->allgather(outputs, inputs, options);
}

RoundRobin::Pointer RoundRobin::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  return next(input)->_allgather_base(output, input, options);
}

RoundRobin::Pointer RoundRobin::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  return next(inputs)->allgather_coalesced(outputs, inputs, options);
}

RoundRobin::Pointer RoundRobin::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  return next(inputs)->allgather_into_tensor_coalesced(outputs, inputs, options);
}

RoundRobin::Pointer RoundRobin::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  return next(inputs)->gather(outputs, inputs, options);
}

RoundRobin::Pointer RoundRobin::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  return next(outputs)->scatter(outputs, inputs, options);
}

RoundRobin::Pointer RoundRobin::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  return next(outputs)->reduce_scatter(outputs, inputs, options);
}

RoundRobin::Pointer RoundRobin::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  return next(output)->_reduce_scatter_base(output, input, options);
}

RoundRobin::Pointer RoundRobin::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  return next(outputs)->reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

RoundRobin::Pointer RoundRobin::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_sizes,
                                              std::vector<std::int64_t>& input_sizes,
                                              const c10d::AllToAllOptions& options) {
  return next(output)->alltoall_base(output, input, output_sizes, input_sizes, options);
}

RoundRobin::Pointer RoundRobin::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return next(outputs)->alltoall(outputs, inputs, options);
}

// -- not in turn

RoundRobin::Pointer RoundRobin::send(Tensors& tensors, int rank, int tag) {
  return first(tensors)->send(tensors, rank, tag);
}

RoundRobin::Pointer RoundRobin::recv(Tensors& tensors, int rank, int tag) {
  return first(tensors)->recv(tensors, rank, tag);
}

RoundRobin::Pointer RoundRobin::recvAnysource(Tensors& tensors, int tag) {
  return first(tensors)->recvAnysource(tensors, tag);
}

RoundRobin::Pointer RoundRobin::barrier(const c10d::BarrierOptions& options) {
  ++given_;
  std::vector<Pointer> works;
  for (const auto& group : groups_) {
    if (Pointer work = group->getBackend(barrier_device(*group, options))->barrier(options)) {
      works.push_back(std::move(work));
    }
  }
  return c10::make_intrusive<AllWorks>(rank_, c10d::OpType::BARRIER, std::move(works));
}

void RoundRobin::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) {
  first({})->monitoredBarrier(options, wait_for_all);
}

}  // namespace ddp_lab
