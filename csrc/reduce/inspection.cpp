#include "reduce/inspection.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace ddp_lab {
namespace {

constexpr std::uint64_t kPrime = 0x9E3779B97F4A7C15ULL;

std::uint64_t mix(std::uint64_t state, std::uint64_t word) {
  state = (state ^ word) * kPrime;
  return state ^ (state >> 29);
}

std::uint64_t checksum(std::uint64_t state, const unsigned char* bytes, std::size_t size) {
  std::size_t i = 0;
  for (; i + sizeof(std::uint64_t) <= size; i += sizeof(std::uint64_t)) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i, sizeof word);
    state = mix(state, word);
  }
  std::uint64_t tail = 0;
  if (i < size) std::memcpy(&tail, bytes + i, size - i);
  return mix(state, tail ^ (static_cast<std::uint64_t>(size) << 1));
}

void add(Inspection& found, double& squares, const at::Tensor& gradient) {
  const at::Tensor host = gradient.to(at::kCPU).contiguous();
  const double norm = host.is_complex() ? at::view_as_real(host).norm(2, at::kDouble).item<double>()
                                        : host.norm(2, at::kDouble).item<double>();
  squares += norm * norm;
  found.checksum = checksum(found.checksum, static_cast<const unsigned char*>(host.const_data_ptr()), host.nbytes());
}

}  // namespace

std::uint64_t checksum_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
  return checksum(0, static_cast<const unsigned char*>(host.const_data_ptr()), host.nbytes());
}

Inspection inspect(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  Inspection found;
  double squares = 0;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) {
      found.checksum = mix(found.checksum, 1);
      continue;
    }
    if (gradient.layout() == at::kStrided) {
      add(found, squares, gradient.detach());
      continue;
    }
    const at::Tensor sparse = gradient.detach().coalesce();  // the same rows in the same order on all ranks
    const at::Tensor rows = sparse.indices().contiguous().to(at::kCPU);
    found.checksum = checksum(found.checksum, static_cast<const unsigned char*>(rows.const_data_ptr()), rows.nbytes());
    add(found, squares, sparse.values());
  }
  found.norm = std::sqrt(squares);
  return found;
}

std::optional<Inspections> inspect_unchanged(const std::vector<std::vector<at::Tensor>>& buckets) {
  std::vector<std::int64_t> versions;
  const auto version_of = [](const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor._version()); };
  for (const auto& tensors : buckets) {
    std::transform(tensors.begin(), tensors.end(), std::back_inserter(versions), version_of);
  }
  Inspections found;
  for (const auto& tensors : buckets) found.push_back(inspect(tensors));
  auto version = versions.begin();
  for (const auto& tensors : buckets) {
    for (const at::Tensor& tensor : tensors) {
      if (*version++ != version_of(tensor)) return std::nullopt;
    }
  }
  return found;
}

}  // namespace ddp_lab
