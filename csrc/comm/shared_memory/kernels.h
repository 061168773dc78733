// Reductions over arrays of the same length, in the order of the ranks: the same inputs give the same bits everywhere.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace ddp_lab::shared_memory {

// Throws c10::ValueError, as a user's mistake, if there is no such reduction of that dtype.
void check_reducible(at::ScalarType dtype, c10d::ReduceOp::RedOpType op);

// into[i] = sources[0][i] op sources[1][i] op ...; AVG divides the sum by the number of sources. float16 and bfloat16
// are summed in float32 and rounded once. `into` may be one of the sources, as a whole.
void reduce(std::byte* into, const std::vector<const std::byte*>& sources, std::size_t elements, at::ScalarType dtype,
            c10d::ReduceOp::RedOpType op);

// to[i] = from[i] * factor, of float32 or float64; the factor is rounded to that first.
void copy_scaled(std::byte* to, const std::byte* from, std::size_t bytes, at::ScalarType dtype, double factor);

}  // namespace ddp_lab::shared_memory
