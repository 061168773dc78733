// What the averaged gradients of a bucket are, in two numbers: equal on all ranks, or something is wrong.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ddp_lab {

struct Inspection {
  double norm = 0;             // Euclidean, over all gradients of the bucket
  std::uint64_t checksum = 0;  // of the gradients' bits in logical order: differs if one bit does (almost surely)
};

// Undefined gradients count as absent. Gradients on a device are copied to the CPU, which waits for the
// device.
Inspection inspect(const std::vector<at::Tensor>& gradients);

}  // namespace ddp_lab
