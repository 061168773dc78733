// Reductions over arrays of the same length, in the order of the ranks: the same inputs give the same bits everywhere.
// And the array that an all-reduce works on, where it lies.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/piecewise.h"

namespace ddp_lab::shared_memory {

// Throws c10::ValueError, as a user's mistake, if there is no such reduction of that dtype.
void check_reducible(at::ScalarType dtype, c10d::ReduceOp::RedOpType op);

// into[i] = sources[0][i] op sources[1][i] op ...; AVG divides the sum by the number of sources. float16 and bfloat16
// are summed in float32 and rounded once. `into` may be one of the sources, as a whole.
void reduce(std::byte* into, const std::vector<const std::byte*>& sources, std::size_t elements, at::ScalarType dtype,
            c10d::ReduceOp::RedOpType op);

// to[i] = from[i] * factor, of float32 or float64; the factor is rounded to that first.
void copy_scaled(std::byte* to, const std::byte* from, std::size_t bytes, at::ScalarType dtype, double factor);

// The array that an all-reduce works on: in one piece of memory, or in several.
class Pieces {
 public:
  // One, in place.
  Pieces(std::byte* data, std::size_t bytes);
  Pieces(std::vector<SumPiece> pieces, at::ScalarType dtype, double factor);

  std::size_t bytes() const { return bytes_; }

  // Where these bytes of the array lie, if that is one place and they stay as they are; else null.
  std::byte* place_of(std::size_t first, std::size_t bytes) const;

  // Copies them, scaled where they have to be; and what becomes of them.
  void read(std::byte* to, std::size_t first, std::size_t bytes) const;
  void write(std::size_t first, std::size_t bytes, const std::byte* from) const;

 private:
  // Calls function(piece, where in it, where in the range, bytes) for each part of the range.
  template <typename Function>
  void each(std::size_t first, std::size_t bytes, Function function) const;
  std::size_t piece_at(std::size_t byte) const;

  std::vector<SumPiece> pieces_;
  std::vector<std::size_t> begins_;
  std::size_t bytes_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  double factor_ = 1.0;
};

}  // namespace ddp_lab::shared_memory
