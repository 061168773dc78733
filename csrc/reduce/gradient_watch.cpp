#include "reduce/gradient_watch.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "record/recorder.h"
#include "reduce/comm_hook.h"

namespace ddp_lab {
namespace {

// Several sums, so that one addition need not wait for the last.
template <typename T>
double squares(const T* values, std::int64_t numel) {
  constexpr std::int64_t kLanes = 8;
  std::array<double, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sums[lane] += value * value;
    }
  }
  for (; i < numel; ++i) sums[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double sum = 0;
  for (const double one : sums) sum += one;
  return sum;
}

at::Tensor dense(const at::Tensor& gradients) {
  return as_reals(gradients.layout() == at::kStrided ? gradients : gradients.coalesce().values());
}

at::ScalarType wide(const at::Tensor& values) { return values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

double host_norm(const at::Tensor& values) {
  if (values.scalar_type() == at::kFloat && values.is_contiguous()) {
    return std::sqrt(squares(values.const_data_ptr<float>(), values.numel()));
  }
  if (values.scalar_type() == at::kDouble && values.is_contiguous()) {
    return std::sqrt(squares(values.const_data_ptr<double>(), values.numel()));
  }
  return at::linalg_vector_norm(values, 2, std::nullopt, false, at::kDouble).item<double>();
}

}  // namespace

void GradientWatch::begin(std::size_t buckets) {
  entries_.assign(buckets, Entry{});
  bad_.clear();
  host_ns_ = 0;
}

void GradientWatch::before(std::size_t index, const Bucket& bucket, int divisor) {
  const at::NoGradGuard no_grad;
  const std::int64_t begin = now_ns();
  Entry& entry = entries_.at(index);
  entry.divisor = divisor;
  const at::Tensor values = dense(bucket.buffer());
  if (!bucket.device().is_cpu()) {
    std::vector<at::Tensor> gradients;
    for (const Slot& slot : bucket.slots()) {
      if (slot.numel == 0) continue;
      entry.parameters.push_back(slot.parameter);
      gradients.push_back(bucket.sparse() ? values : as_reals(slot.view));
    }
    if (!gradients.empty()) entry.device_norms = at::stack(at::_foreach_norm(gradients, 2, wide(values)));
  } else {
    entry.before = host_norm(values) * divisor;
    if (!std::isfinite(entry.before)) locate(bucket, values);
  }
  host_ns_ += now_ns() - begin;
}

void GradientWatch::locate(const Bucket& bucket, const at::Tensor& values) {
  for (const Slot& slot : bucket.slots()) {
    const at::Tensor gradient = bucket.sparse() ? values : as_reals(slot.view);
    if (at::isfinite(gradient).all().item<bool>()) continue;
    bad_.push_back({slot.parameter, at::isnan(gradient).any().item<bool>()});
  }
}

void GradientWatch::after(std::size_t index, const at::Tensor& reduced) {
  const at::NoGradGuard no_grad;
  const std::int64_t begin = now_ns();
  Entry& entry = entries_.at(index);
  const at::Tensor values = dense(reduced);
  if (values.is_cpu()) {
    entry.after = host_norm(values);
  } else {
    entry.device_after = at::linalg_vector_norm(values, 2, std::nullopt, false, wide(values));
  }
  host_ns_ += now_ns() - begin;
}

void GradientWatch::read_device(Entry& entry) {
  if (entry.device_norms.defined()) {
    const at::Tensor norms = entry.device_norms.to(at::kCPU, at::kDouble);
    const double* const one = norms.const_data_ptr<double>();
    for (std::size_t i = 0; i < entry.parameters.size(); ++i) {
      if (!std::isfinite(one[i])) bad_.push_back({entry.parameters[i], std::isnan(one[i])});
    }
    entry.before = host_norm(norms) * entry.divisor;
  }
  if (entry.device_after.defined()) entry.after = entry.device_after.item<double>();
}

GradientWatch::Found GradientWatch::collect(const std::vector<std::size_t>& order) {
  const std::int64_t begin = now_ns();
  Found found;
  for (Entry& entry : entries_) {
    read_device(entry);
    found.before.push_back(entry.before);
    found.after.push_back(entry.after);
  }
  for (const Bad& bad : bad_) {
    const auto place = std::find(order.begin(), order.end(), bad.parameter) - order.begin();
    if (found.position >= 0 && place >= found.position) continue;
    found.position = place;
    found.parameter = static_cast<std::int64_t>(bad.parameter);
    found.nan = bad.nan;
  }
  found.parameters = static_cast<std::int64_t>(bad_.size());
  found.host_ns = host_ns_ + now_ns() - begin;
  return found;
}

}  // namespace ddp_lab
