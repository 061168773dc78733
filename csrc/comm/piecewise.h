// Sums over ranks of what lies in several places, without a flat buffer to copy it into.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace ddp_lab {

// A part of the array that is summed: read at `source`, times the factor where it is `scaled`; the sum goes to
// `target`, which is the same memory or other.
struct SumPiece {
  const std::byte* source;
  std::byte* target;
  std::size_t bytes;
  bool scaled;
};

// What a c10d backend may be besides.
class PiecewiseBackend {
 public:
  virtual ~PiecewiseBackend() = default;

  // Sums the array that the pieces make one after the other. For the other ranks it is an all_reduce of a tensor `like`
  // this one: they may have it in other pieces, or in one. `factor` is rounded to its dtype, float32 or float64, first.
  // `kept`: tensors whose memory the pieces are.
  virtual c10::intrusive_ptr<c10d::Work> sum_pieces(const at::Tensor& like, std::vector<SumPiece> pieces, double factor,
                                                    std::vector<at::Tensor> kept) = 0;
};

}  // namespace ddp_lab
