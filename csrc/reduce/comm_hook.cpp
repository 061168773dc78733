#include "reduce/comm_hook.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <vector>

namespace ddp_lab {
namespace {

// Backends know no complex numbers: they sum real and imaginary parts as two reals.
at::Tensor as_reals(const at::Tensor& buffer) { return buffer.is_complex() ? at::view_as_real(buffer) : buffer; }

// The average, as torch's DDP without a hook has it but with the division first.
class AllReduceHook final : public CommHook {
 public:
  explicit AllReduceHook(GroupPointer group) : CommHook("ALLREDUCE"), group_(std::move(group)) {}

  FuturePointer run(std::unique_ptr<GradBucket> bucket) override {
    bucket->getBufferRef().div_(group_->getSize());
    return all_reduce(*group_, *bucket);
  }

  void set_group(GroupPointer group) override { group_ = std::move(group); }

 private:
  GroupPointer group_;
};

// Half the bytes: divided before it is summed, so that the sum does not overflow.
class Fp16CompressHook final : public CommHook {
 public:
  explicit Fp16CompressHook(GroupPointer group) : CommHook("FP16_COMPRESS"), group_(std::move(group)) {}

  FuturePointer run(std::unique_ptr<GradBucket> bucket) override {
    std::vector<at::Tensor> compressed{bucket->getBuffer().to(at::kHalf).div_(group_->getSize())};
    const FuturePointer sum = group_->allreduce(compressed)->getFuture();
    const auto decompress = [buffer = bucket->getBuffer(), half = compressed.front()](c10::ivalue::Future& done) {
      if (done.hasError()) std::rethrow_exception(done.exception_ptr());
      buffer.copy_(half);
      return c10::IValue(buffer);
    };
    return sum->then(decompress, c10::TensorType::get());
  }

  void set_group(GroupPointer group) override { group_ = std::move(group); }

 private:
  GroupPointer group_;
};

std::string describe(const Bucket& bucket, std::size_t index) {
  constexpr std::size_t kMost = 5;
  const std::vector<Slot>& slots = bucket.slots();
  std::string text = "bucket " + std::to_string(index) + " (";
  for (std::size_t i = 0; i < std::min(slots.size(), kMost); ++i) text += (i ? ", '" : "'") + slots[i].name + "'";
  if (slots.size() > kMost) text += " and " + std::to_string(slots.size() - kMost) + " more";
  return text + ")";
}

// The hook's tensor in the form of the bucket's buffer.
at::Tensor fit(at::Tensor reduced, CommHook& hook, const Bucket& bucket, std::size_t index) {
  const at::Tensor& buffer = bucket.buffer();
  const bool complex = buffer.is_complex() && !reduced.is_complex();
  const std::int64_t numel = buffer.numel() * (complex ? 2 : 1);
  const bool fits = reduced.layout() == at::kStrided ? reduced.numel() == numel : reduced.sizes() == buffer.sizes();
  TORCH_CHECK(fits && reduced.device() == bucket.device(), "The comm hook's future holds a tensor that does not fit: '",
              hook.name(), "' returned ", reduced.sizes(), " on ", reduced.device(), " for ", describe(bucket, index),
              ", whose gradients are ", numel, " elements on ", bucket.device(),
              ". Return a tensor of as many elements as bucket.buffer() has.");
  const at::ScalarType dtype = complex ? c10::toRealValueType(buffer.scalar_type()) : buffer.scalar_type();
  if (reduced.scalar_type() != dtype) {
    if (!hook.warned) {
      TORCH_WARN("The comm hook '", hook.name(), "' returned ", reduced.scalar_type(), " for ", describe(bucket, index),
                 ", whose gradients are ", dtype, ": it is converted. Convert it in the hook, e.g. by copying it to ",
                 "bucket.buffer().");
    }
    hook.warned = true;
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

at::Tensor CommHook::result(const c10::IValue& value) const {
  if (value.isTensor()) return value.toTensor();
  TORCH_CHECK(value.isTensorList() && value.toTensorList().size() == 1, "The future of the comm hook '", name(),
              "' must hold one tensor; it holds ", value.tagKind());
  return value.toTensorList().get(0);
}

HookPointer make_builtin_hook(c10d::BuiltinCommHookType kind, GroupPointer group) {
  if (kind == c10d::BuiltinCommHookType::ALLREDUCE) return std::make_unique<AllReduceHook>(std::move(group));
  return std::make_unique<Fp16CompressHook>(std::move(group));
}

Launched start_all_reduce(c10d::ProcessGroup& group, const Bucket& bucket) {
  std::vector<at::Tensor> tensors{as_reals(bucket.buffer())};
  Launched launched;
  launched.work = group.allreduce(tensors);
  launched.future = launched.work->getFuture();
  return launched;
}

FuturePointer all_reduce(c10d::ProcessGroup& group, c10d::GradBucket& bucket) {
  std::vector<at::Tensor> tensors{as_reals(bucket.getBuffer())};
  return group.allreduce(tensors)->getFuture();
}

Launched start_hook(CommHook& hook, const Bucket& bucket, std::size_t index, std::size_t count) {
  if (hook.reads_gradients()) make_row_major(bucket);
  Launched launched;
  launched.future = hook.run(std::make_unique<GradBucket>(bucket, index, count));
  return launched;
}

at::Tensor wait_for(const Launched& launched, CommHook* hook, const Bucket& bucket, std::size_t index) {
  if (launched.work) {
    launched.work->wait();
    return bucket.buffer();
  }
  launched.future->waitAndThrow();
  const at::Tensor reduced = fit(hook->result(launched.future->value()), *hook, bucket, index);
  return hook->reads_gradients() && !bucket.sparse() ? restore_strides(reduced, bucket) : reduced;
}

}  // namespace ddp_lab
