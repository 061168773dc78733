// Memory of this process that the ranks of its groups may read: a tensor in it is reduced without a copy.
//
// [Note: tensors that other ranks read]
// A process has one pool, an anonymous file as large as the machine's memory: pages cost memory from their first write
// until their tensor goes. The ranks of a group map one another's pools, only to read them. So a rank that lags behind,
// in an operation that has failed elsewhere, can't write into gradients that their owner already uses again. The pool
// belongs to the process and not to a group: buckets stay where they are when their model's group is replaced, and any
// other group of these ranks may reduce them.
//
// Owner of what is free: `mutex_`. A fork has the mappings of its parent's pool, and makes one of its own when asked.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "comm/shared_memory/segment.h"

namespace ddp_lab::shared_memory {

// The first byte of a pool, as one of its readers has it mapped; keeps the mapping.
using PoolView = std::shared_ptr<const std::byte>;

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // Of this process. Throws std::system_error where the system gives no such memory.
  static std::shared_ptr<Pool> own();

  // That of process `pid`, which has it open as `descriptor`. Throws as Segment::attach does.
  static PoolView of_process(int pid, int descriptor, std::size_t bytes);

  explicit Pool(std::size_t bytes);

  int descriptor() const { return segment_.descriptor(); }
  std::size_t bytes() const { return bytes_; }
  PoolView view();

  // A tensor of one dimension, not initialised; undefined if the pool is full.
  at::Tensor allocate(std::int64_t numel, const at::TensorOptions& options);

  // Where in the pool these bytes are, if they are.
  std::optional<std::size_t> offset_of(const void* data, std::size_t bytes) const;

 private:
  void release(std::size_t first, std::size_t bytes);

  const std::size_t bytes_;
  const int pid_;
  Segment segment_;

  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // sizes by where they begin; no two of them touch
};

}  // namespace ddp_lab::shared_memory
