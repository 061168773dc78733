#include "reduce/reduction.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "comm/collective_interception.h"
#include "reduce/warnings.h"

namespace ddp_lab {
namespace {

// Null if the group has none.
c10::intrusive_ptr<c10d::Backend> cpu_backend(c10d::ProcessGroup& group) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const auto on_cpu = [](const c10::Device& device) { return device.is_cpu(); };
  if (!std::any_of(devices.begin(), devices.end(), on_cpu)) return nullptr;
  return group.getBackend(c10::DeviceType::CPU);
}

std::string describe(const Bucket& bucket, std::size_t index) {
  constexpr std::size_t kMost = 5;
  const std::vector<Slot>& slots = bucket.slots();
  std::string text = "bucket " + std::to_string(index) + " (";
  for (std::size_t i = 0; i < std::min(slots.size(), kMost); ++i) text += (i ? ", '" : "'") + slots[i].name + "'";
  if (slots.size() > kMost) text += " and " + std::to_string(slots.size() - kMost) + " more";
  return text + ")";
}

// The tensor of the hook, or of the group if there is none, in the form of the bucket's buffer.
at::Tensor fit(at::Tensor reduced, CommHook* hook, const Bucket& bucket, std::size_t index) {
  const at::Tensor& buffer = bucket.buffer();
  const bool complex = buffer.is_complex() && !reduced.is_complex();
  const std::int64_t numel = buffer.numel() * (complex ? 2 : 1);
  const bool fits = reduced.layout() == at::kStrided ? reduced.numel() == numel : reduced.sizes() == buffer.sizes();
  const std::string who = hook ? "comm hook" : "process group";
  const std::string name = hook ? hook->name() : "all_reduce";
  TORCH_CHECK(fits && reduced.device() == bucket.device(), "The ", who, "'s future holds a tensor that does not fit: '",
              name, "' returned ", reduced.sizes(), " on ", reduced.device(), " for ", describe(bucket, index),
              ", whose gradients are ", numel, " elements on ", bucket.device(),
              ". Return a tensor of as many elements as bucket.buffer() has.");
  const at::ScalarType dtype = complex ? c10::toRealValueType(buffer.scalar_type()) : buffer.scalar_type();
  if (reduced.scalar_type() != dtype) {
    if (hook && !hook->warned) {
      warnings().add(c10::str("The comm hook '", name, "' returned ", reduced.scalar_type(), " for ",
                              describe(bucket, index), ", whose gradients are ", dtype,
                              ": it is converted. Convert it in the hook, e.g. by copying it to ", "bucket.buffer()."));
    }
    if (hook) hook->warned = true;
    reduced = reduced.to(dtype);
  }
  return complex ? at::view_as_complex(reduced.reshape({buffer.numel(), 2})) : reduced;
}

// See [Note: what a hook sees].
void make_row_major(const Bucket& bucket) {
  const at::NoGradGuard no_grad;
  for (const Slot& slot : bucket.slots()) {
    if (!slot.view.defined() || slot.view.is_contiguous()) continue;
    bucket.buffer().narrow(0, slot.offset, slot.numel).copy_(slot.view.reshape({-1}));
  }
}

// Gives the gradients in `reduced` their parameters' strides. What is not the bucket's own memory stays the hook's.
at::Tensor restore_strides(at::Tensor reduced, const Bucket& bucket) {
  const at::NoGradGuard no_grad;
  bool own = reduced.is_alias_of(bucket.buffer());
  for (const Slot& slot : bucket.slots()) {
    if (!slot.view.defined() || slot.view.is_contiguous()) continue;
    reduced = own ? reduced.reshape({-1}) : reduced.reshape({-1}).clone();
    own = true;
    const at::Tensor rows = reduced.narrow(0, slot.offset, slot.numel).view(slot.view.sizes()).clone();
    slot_view(reduced, slot.variable, slot.offset).copy_(rows);
  }
  return reduced;
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

// These go to the backend itself, so they don't pass the dispatcher.
Launched Reduction::start_watched_pieces(const Bucket& bucket) {
  CollectiveCall call{"allreduce_", *group_};
  call.add(bucket.bytes());
  call.first = bucket.buffer();
  call.reduction = c10d::ReduceOp::SUM;
  Watches watches = watch(call);
  Launched launched = start_pieces(*piecewise_, bucket, divisor());
  follow(std::move(watches), *launched.work);
  return launched;
}

Launched Reduction::start(const Bucket& bucket, std::size_t index, std::size_t count) {
  if (!hook_) {
    if (bucket.in_place()) return start_watched_pieces(bucket);
    return start_all_reduce(*group_, as_reals(bucket.buffer()));
  }
  if (hook_->reads_gradients()) make_row_major(bucket);
  Launched launched;
  launched.future = hook_->run(std::make_unique<GradBucket>(bucket, index, count));
  return launched;
}

at::Tensor Reduction::wait(const Launched& launched, const Bucket& bucket, std::size_t index) const {
  if (launched.work) {  // perhaps of pieces, which have no buffer
    launched.work->wait();
    return bucket.buffer();
  }
  if (!hook_) return fit(finish(launched, as_reals(bucket.buffer())), nullptr, bucket, index);
  launched.future->waitAndThrow();
  const at::Tensor reduced = fit(hook_->result(launched.future->value()), hook_.get(), bucket, index);
  return hook_->reads_gradients() && !bucket.sparse() ? restore_strides(reduced, bucket) : reduced;
}

}  // namespace ddp_lab
