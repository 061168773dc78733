#include "reduce/reduction.h"

#include <algorithm>

namespace ddp_lab {
namespace {

// Null if the group has none.
c10::intrusive_ptr<c10d::Backend> cpu_backend(c10d::ProcessGroup& group) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const auto on_cpu = [](const c10::Device& device) { return device.is_cpu(); };
  if (!std::any_of(devices.begin(), devices.end(), on_cpu)) return nullptr;
  return group.getBackend(c10::DeviceType::CPU);
}

}  // namespace

Reduction::Reduction(GroupPointer group) { swap_group(group); }

void Reduction::swap_group(GroupPointer& group) {
  std::swap(group_, group);
  piecewise_ = dynamic_cast<PiecewiseBackend*>(cpu_backend(*group_).get());
  if (hook_) hook_->set_group(group_);
}

// [Note: buffers in the backend's memory]
// A backend may have memory from which it reduces without copying ("shm" has); the buffers of CPU parameters go there.
// They are made anew when the group is replaced. Buffers on demand stay ordinary memory: to fetch new pages in every
// backward would cost more than the copies.
MakeBuffer Reduction::cpu_memory() const {
  const c10::intrusive_ptr<c10d::Backend> backend = cpu_backend(*group_);
  if (!backend || !backend->supportsTensorAlloc(-1)) return nullptr;
  return [backend](std::int64_t numel, const at::TensorOptions& options) {
    return backend->allocateTensor(numel, options);
  };
}

void Reduction::wait_for_futures() const {
  for (const FuturePointer& future : futures_) future->waitAndThrow();
}

int Reduction::divisor() {
  if (hook_) return 1;  // the hook averages
  if (divisor_ != 0) return divisor_;
  divisor_ = group_->getSize();
  if (!remaining_ranks_) return divisor_;
  if (!is_subclassed(*group_)) remaining_ranks_->wait();
  const FuturePointer future = remaining_ranks_->getFuture();
  future->waitAndThrow();
  divisor_ = sum_in(future->value()).flatten()[0].item<int>();  // other elements are the caller's
  return divisor_;
}

Launched Reduction::start(const Bucket& bucket, std::size_t index, std::size_t count) {
  if (hook_) return start_hook(*hook_, bucket, index, count);
  if (bucket.in_place()) return start_pieces(*piecewise_, bucket, divisor());
  return start_all_reduce(*group_, bucket);
}

}  // namespace ddp_lab
