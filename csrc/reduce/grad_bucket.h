// GradBucket: what a comm hook is given. Torch's class, with gradients that are right for every parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "reduce/bucket.h"

namespace ddp_lab {

// [Note: what a hook sees]
// The buffer is flat; one of complex gradients is given as twice as many reals, since backends sum reals. Torch cuts
// that buffer at the offsets of the complex one and knows no strides, so there `gradients()` is wrong for complex
// and for channels-last parameters. Here it is one tensor per parameter, of its shape, strides and dtype, and a view
// of the buffer wherever the buffer's dtype allows it. A sparse bucket's buffer is the gradient itself.
// A hook may keep its GradBucket for longer than the reducer keeps the Bucket.
class GradBucket : public c10d::GradBucket {
 public:
  GradBucket(const Bucket& bucket, std::size_t index, std::size_t count);

  // Of the buffer as it is now, which set_buffer may have replaced by one of another dtype.
  std::vector<at::Tensor> gradients() const;

 private:
  std::vector<std::int64_t> offsets_;  // empty: sparse
  std::int64_t numel_;
  bool complex_;
};

}  // namespace ddp_lab
