// One rank's error, raised on all ranks of its group.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ddp_lab {

// [Note: the same error on every rank]
// A rank whose backward left parameters without a gradient has launched fewer buckets than the others, and raises at
// its next forward. The others wait for its part of the remaining buckets and would learn nothing but that a connection
// was closed. So the rank that fails
//   1. writes its message to the group's store, under a key that all ranks can tell: reducer and step,
//   2. contributes NaN to each bucket that it has not launched, from tensors of its own.
// A rank that gets a bucket back whose first element is NaN looks into the store: if there is a message it raises that,
// and if there is none the gradients really are NaN. It looks once a backward, and when a collective fails.
// CPU buckets without a comm hook only: looking at a number on a device would wait for the device.
class SharedError {
 public:
  SharedError(c10d::ProcessGroup& group, std::int32_t reducer, std::int64_t step);

  // `unlaunched`: the buffers of the buckets that the other ranks wait for, in bucket order. Waits until the others
  // have them, at most `kPatience`.
  void raise_everywhere(const std::string& message, const std::vector<at::Tensor>& unlaunched) const;
  // What another rank wrote; empty if none did.
  std::string found() const;

  // Whether the first element, of float or complex tensors on the CPU, is NaN.
  static bool marks(const at::Tensor& reduced);

 private:
  c10d::ProcessGroup& group_;
  std::string key_;
};

}  // namespace ddp_lab
