// GradBucket: what a comm hook is given. Torch's class, with gradients that are right for every parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "reduce/bucket.h"

namespace ddp_lab {

// [Note: what a hook sees]
// The buffer is flat; one of complex gradients is given as twice as many reals, since backends sum reals. While a hook
// of the user's has it, each gradient in it is row-major, whatever its parameter's strides are: `gradients()` are views
// of the buffer that any code can take for matrices (PowerSGD does, by `view`). Torch leaves channels-last gradients as
// they are and cuts them out as if they were row-major, and cuts complex ones at wrong offsets. The strides come back
// with the result (comm_hook.cpp). A sparse bucket's buffer is the gradient itself.
// A hook may keep its GradBucket for longer than the reducer keeps the Bucket.
class GradBucket : public c10d::GradBucket {
 public:
  GradBucket(const Bucket& bucket, std::size_t index, std::size_t count);

  // One tensor for each parameter, of its shape, in the buffer as it is now: set_buffer may have replaced it by one of
  // another dtype.
  std::vector<at::Tensor> gradients() const;

 private:
  bool sparse_;
  bool complex_;
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;  // offset and numel of each parameter
};

}  // namespace ddp_lab
