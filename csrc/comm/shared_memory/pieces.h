// The array that an all-reduce works on, where it lies: in one piece of memory, or in several.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

#include "comm/piecewise.h"

namespace ddp_lab::shared_memory {

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
