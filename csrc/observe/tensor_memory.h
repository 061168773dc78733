// Bytes that tensors hold in the memory of the CPU: torch has no such statistics.
//
// [Note: how tensors' bytes are counted]
// From the first `count_tensor_memory(true)` on, an allocator of ours stands before torch's CPU allocator. While it
// counts, it notes the size of each allocation, on any thread (Gloo's threads allocate too), and where it is freed
// again. While it does not count, it only passes on. It stays, because storages remember their allocator: those that
// are made while it does not count and resized later (as `fully_shard` does with gathered parameters) are seen.
#pragma once

#include <cstdint>

namespace ddp_lab {

struct TensorMemory {
  std::int64_t bytes = 0;  // allocated while it was counted, and not freed
  std::int64_t peak = 0;   // the most since the last `restart_tensor_memory_peak`
};

// Any thread.
void count_tensor_memory(bool on);
[[nodiscard]] TensorMemory tensor_memory();
void restart_tensor_memory_peak();

}  // namespace ddp_lab
