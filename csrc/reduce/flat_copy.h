// Loops over plain CPU memory that a bucket needs: copy, copy and scale, divide. Several threads where torch's own
// elementwise loops would use them, and the same bits as those.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace ddp_lab {

// float32 and float64: the others go through torch's operators.
bool can_scale(at::ScalarType dtype);

void copy_bytes(void* to, const void* from, std::int64_t bytes);
// to[i] = from[i] * scale, where `scale` is rounded to `dtype` first.
void copy_scaled(at::ScalarType dtype, void* to, const void* from, double scale, std::int64_t numel);
// data[i] /= divisor
void divide_in_place(at::ScalarType dtype, void* data, int divisor, std::int64_t numel);

}  // namespace ddp_lab
