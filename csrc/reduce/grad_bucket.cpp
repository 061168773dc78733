#include "reduce/grad_bucket.h"

#include <ATen/Functions.h>

#include <optional>
#include <utility>

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

}  // namespace ddp_lab
