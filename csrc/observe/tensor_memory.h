// Bytes that tensors hold in the memory of the CPU: torch has no such statistics.
//
// [Note: how tensors' bytes are counted]
// An allocator of ours stands before torch's CPU allocator from the import on. Usually it only passes on, which is too
// little to be measured beside the 600 ns of a torch.empty; counting takes about 40 ns more. While it counts, it notes
// the size of each allocation, on any thread (Gloo's threads allocate, too), and where it is freed again. It is there
// from the beginning, because storages remember their allocator: `fully_shard` makes those of gathered parameters once,
// and resizes them in each step.
#pragma once

#include <cstdint>

namespace ddp_lab {

struct TensorMemory {
  std::int64_t bytes = 0;  // allocated while it was counted, and not freed
  std::int64_t peak = 0;   // the most since the last `restart_tensor_memory_peak`
};

// Once, before there are storages to be seen. Not if a library with a higher priority has replaced torch's allocator.
void see_tensor_memory();

// Any thread. Throws a c10::Error if ours does not stand there.
void count_tensor_memory(bool on);
[[nodiscard]] TensorMemory tensor_memory();
void restart_tensor_memory_peak();

}  // namespace ddp_lab
