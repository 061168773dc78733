#include "reduce/comm_hook.h"

#include <ATen/Functions.h>

#include <exception>
#include <optional>
#include <vector>

namespace ddp_lab {
namespace {

at::Tensor hook_buffer(const Bucket& bucket) {
  const at::Tensor& buffer = bucket.buffer();
  return buffer.is_complex() ? at::view_as_real(buffer).view({-1}) : buffer;
}

c10d::GradBucket torchs(const Bucket& bucket, std::size_t index, std::size_t count) {
  const std::size_t n = bucket.slots().size();
  std::vector<std::size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  parameters.reserve(n);
  for (const Slot& slot : bucket.slots()) parameters.push_back(slot.variable);
  if (!bucket.sparse()) {
    offsets.reserve(n);
    lengths.reserve(n);
    sizes.reserve(n);
    for (const Slot& slot : bucket.slots()) {
      offsets.push_back(static_cast<std::size_t>(slot.offset));
      lengths.push_back(static_cast<std::size_t>(slot.numel));
      sizes.push_back(slot.variable.sizes());
    }
  }
  return c10d::GradBucket(index, count, hook_buffer(bucket), std::move(offsets), std::move(lengths), std::move(sizes),
                          std::move(parameters), bucket.known_rows());
}

bool can_be_complex(const at::Tensor& reals) {
  return reals.scalar_type() == at::kFloat || reals.scalar_type() == at::kDouble || reals.scalar_type() == at::kHalf;
}

// Undefined if there is none.
at::Tensor first_tensor(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  std::vector<at::Tensor> found;
  if (value.isTensorList()) found = value.toTensorVector();
  if (value.isPyObject()) found = value.toPyObjectHolder()->extractTensors();
  return found.empty() ? at::Tensor() : found.front();
}

class BuiltinHook : public CommHook {
 public:
  BuiltinHook(std::string name, GroupPointer group) : CommHook(std::move(name)), group_(std::move(group)) {}

  void set_group(GroupPointer group) override { group_ = std::move(group); }

 protected:
  GroupPointer group_;
};

// The average, as torch's DDP without a hook has it but with the division first.
class AllReduceHook final : public BuiltinHook {
 public:
  explicit AllReduceHook(GroupPointer group) : BuiltinHook("ALLREDUCE", std::move(group)) {}

  FuturePointer run(std::unique_ptr<GradBucket> bucket) override {
    bucket->getBufferRef().div_(group_->getSize());
    return all_reduce(*group_, *bucket);
  }
};

// Half the bytes: divided before it is summed, so that the sum does not overflow.
class Fp16CompressHook final : public BuiltinHook {
 public:
  explicit Fp16CompressHook(GroupPointer group) : BuiltinHook("FP16_COMPRESS", std::move(group)) {}

  FuturePointer run(std::unique_ptr<GradBucket> bucket) override {
    std::vector<at::Tensor> compressed{bucket->getBuffer().to(at::kHalf).div_(group_->getSize())};
    const FuturePointer sum = group_->allreduce(compressed)->getFuture();
    const auto decompress = [buffer = bucket->getBuffer()](c10::ivalue::Future& done) {
      if (done.hasError()) std::rethrow_exception(done.exception_ptr());
      buffer.copy_(sum_in(done.value()));
      return c10::IValue(buffer);
    };
    return sum->then(decompress, c10::TensorType::get());
  }
};

}  // namespace

GradBucket::GradBucket(const Bucket& bucket, std::size_t index, std::size_t count)
    : c10d::GradBucket(torchs(bucket, index, count)),
      sparse_(bucket.sparse()),
      complex_(!bucket.sparse() && bucket.buffer().is_complex()) {
  ranges_.reserve(bucket.slots().size());
  for (const Slot& slot : bucket.slots()) ranges_.emplace_back(slot.offset, slot.numel);
}

std::vector<at::Tensor> GradBucket::gradients() const {
  if (sparse_) return {getBuffer()};
  at::Tensor flat = getBuffer();
  if (complex_ && !flat.is_complex()) {
    flat = flat.reshape({-1, 2});
    flat = at::view_as_complex(can_be_complex(flat) ? flat : flat.to(at::kFloat));
  }
  flat = flat.reshape({-1});
  const std::vector<at::Tensor> parameters = getParameters();
  std::vector<at::Tensor> gradients;
  gradients.reserve(ranges_.size());
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    const auto [offset, numel] = ranges_[i];
    gradients.push_back(flat.narrow(0, offset, numel).view(parameters[i].sizes()));
  }
  return gradients;
}

at::Tensor as_reals(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

at::Tensor CommHook::result(const c10::IValue& value) const {
  const bool several = value.isTensorList() && value.toTensorList().size() != 1;
  const at::Tensor held = several ? at::Tensor() : first_tensor(value);
  TORCH_CHECK(held.defined(), "The future of the comm hook '", name(), "' must hold one tensor; it holds ",
              value.tagKind());
  return held;
}

HookPointer make_builtin_hook(c10d::BuiltinCommHookType kind, GroupPointer group) {
  if (kind == c10d::BuiltinCommHookType::ALLREDUCE) return std::make_unique<AllReduceHook>(std::move(group));
  return std::make_unique<Fp16CompressHook>(std::move(group));
}

Launched start_all_reduce(c10d::ProcessGroup& group, const at::Tensor& summed) {
  std::vector<at::Tensor> tensors{summed};
  c10::intrusive_ptr<c10d::Work> work = group.allreduce(tensors);
  Launched launched;
  launched.future = work->getFuture();
  if (!is_subclassed(group)) launched.work = std::move(work);
  return launched;
}

at::Tensor sum_in(const c10::IValue& value) {
  const at::Tensor held = first_tensor(value);
  // For C++, what set_exception() of a future in Python was given is a value like any other.
  TORCH_CHECK(held.defined(), "The future of the process group's all_reduce holds no tensor, but ",
              value.isPyObject() ? value.toPyObjectHolder()->toStr() : value.tagKind());
  return held;
}

at::Tensor finish(const Launched& launched, const at::Tensor& summed) {
  if (launched.work) {
    launched.work->wait();
    return summed;
  }
  launched.future->waitAndThrow();
  return sum_in(launched.future->value());
}

FuturePointer all_reduce(c10d::ProcessGroup& group, c10d::GradBucket& bucket) {
  std::vector<at::Tensor> tensors{as_reals(bucket.getBuffer())};
  return group.allreduce(tensors)->getFuture();
}

}  // namespace ddp_lab
