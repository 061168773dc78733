#include "reduce/flat_copy.h"

#include <ATen/Parallel.h>

#include <cstddef>
#include <cstring>

namespace ddp_lab {
namespace {

// As many elements as torch's own elementwise loops give to one thread at least.
constexpr std::int64_t kGrain = 32768;

template <typename T>
void scale_into(void* to, const void* from, double scale, std::int64_t numel) {
  T* const target = static_cast<T*>(to);
  const T* const source = static_cast<const T*>(from);
  const T factor = static_cast<T>(scale);
  at::parallel_for(0, numel, kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) target[i] = source[i] * factor;
  });
}

template <typename T>
void divide(void* data, int divisor, std::int64_t numel) {
  T* const values = static_cast<T*>(data);
  const T by = static_cast<T>(divisor);
  at::parallel_for(0, numel, kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) values[i] /= by;
  });
}

}  // namespace

bool can_scale(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  at::parallel_for(0, bytes, kGrain * 4, [=](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

void copy_scaled(at::ScalarType dtype, void* to, const void* from, double scale, std::int64_t numel) {
  if (dtype == at::kFloat) {
    scale_into<float>(to, from, scale, numel);
  } else {
    scale_into<double>(to, from, scale, numel);
  }
}

void divide_in_place(at::ScalarType dtype, void* data, int divisor, std::int64_t numel) {
  if (dtype == at::kFloat) {
    divide<float>(data, divisor, numel);
  } else {
    divide<double>(data, divisor, numel);
  }
}

}  // namespace ddp_lab
