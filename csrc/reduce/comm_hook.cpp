#include "reduce/comm_hook.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <vector>

namespace ddp_lab {
namespace {

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

// Undefined if there is none.
at::Tensor first_tensor(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  std::vector<at::Tensor> found;
  if (value.isTensorList()) found = value.toTensorVector();
  if (value.isPyObject()) found = value.toPyObjectHolder()->extractTensors();
  return found.empty() ? at::Tensor() : found.front();
}

// Half the bytes: divided before it is summed, so that the sum does not overflow.
class Fp16CompressHook final : public CommHook {
 public:
  explicit Fp16CompressHook(GroupPointer group) : CommHook("FP16_COMPRESS"), group_(std::move(group)) {}

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
      TORCH_WARN("The comm hook '", name, "' returned ", reduced.scalar_type(), " for ", describe(bucket, index),
                 ", whose gradients are ", dtype, ": it is converted. Convert it in the hook, e.g. by copying it to ",
                 "bucket.buffer().");
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

Launched start_all_reduce(c10d::ProcessGroup& group, const Bucket& bucket) {
  return start_all_reduce(group, as_reals(bucket.buffer()));
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

Launched start_hook(CommHook& hook, const Bucket& bucket, std::size_t index, std::size_t count) {
  if (hook.reads_gradients()) make_row_major(bucket);
  Launched launched;
  launched.future = hook.run(std::make_unique<GradBucket>(bucket, index, count));
  return launched;
}

at::Tensor wait_for(const Launched& launched, CommHook* hook, const Bucket& bucket, std::size_t index) {
  if (launched.work) {  // perhaps of pieces, which have no buffer
    launched.work->wait();
    return bucket.buffer();
  }
  if (!hook) return fit(finish(launched, as_reals(bucket.buffer())), nullptr, bucket, index);
  launched.future->waitAndThrow();
  const at::Tensor reduced = fit(hook->result(launched.future->value()), hook, bucket, index);
  return hook->reads_gradients() && !bucket.sparse() ? restore_strides(reduced, bucket) : reduced;
}

}  // namespace ddp_lab
