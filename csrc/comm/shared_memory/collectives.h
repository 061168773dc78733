// The operations on bytes. Each rank calls the same one with the same sizes; all of them are deterministic.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/shared_memory/group.h"
#include "comm/shared_memory/kernels.h"

namespace ddp_lab::shared_memory {

struct Reduction {
  at::ScalarType dtype;
  c10d::ReduceOp::RedOpType op;
  std::size_t item;  // bytes of an element
};

constexpr int kAll = -1;

// `array` becomes the reduction over all ranks: on rank `root`, or on all of them.
void all_reduce(Group& group, const Pieces& array, const Reduction& reduction, int root, const WaitPolicy& policy);

void broadcast(Group& group, std::byte* data, std::size_t bytes, int root, const WaitPolicy& policy);

// outputs[r] becomes what rank r has in `input`: on rank `root`, or on all of them; elsewhere `outputs` is empty.
void all_gather(Group& group, const std::byte* input, const std::vector<std::byte*>& outputs, std::size_t bytes,
                int root, const WaitPolicy& policy);

// `output` becomes what rank `root` has in inputs[rank]; elsewhere `inputs` is empty.
void scatter(Group& group, const std::vector<const std::byte*>& inputs, std::byte* output, std::size_t bytes, int root,
             const WaitPolicy& policy);

// What goes to, or comes from, one rank.
struct Piece {
  std::byte* data;
  std::size_t bytes;
};

// outputs[r] becomes what rank r has in inputs[rank]; sizes may differ. Throws GroupError, on all ranks, where a rank
// expects another size than it is sent.
void all_to_all(Group& group, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs,
                const WaitPolicy& policy);

// `output` becomes the reduction of what all ranks have in inputs[rank]; it may be inputs[rank] itself.
void reduce_scatter(Group& group, const std::vector<const std::byte*>& inputs, std::byte* output, std::size_t elements,
                    const Reduction& reduction, const WaitPolicy& policy);

}  // namespace ddp_lab::shared_memory
