// The c10d backend "shm": collectives through shared memory for the CPU ranks of one host. What it does not do itself
// goes to a Gloo group of the same ranks: sending and receiving, uneven sizes, sparse tensors.
#pragma once

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/shared_memory/group.h"

namespace ddp_lab::shared_memory {

c10::intrusive_ptr<c10d::Backend> make_backend(std::unique_ptr<Group> group, c10::intrusive_ptr<c10d::Backend> gloo,
                                               std::chrono::milliseconds timeout);

// Of such a backend; nothing of another one.
std::optional<std::chrono::milliseconds> timeout_of(c10d::Backend& backend);

// Whether it is such a backend of which every operation fails from now on.
bool is_broken(const c10d::Backend& backend);

}  // namespace ddp_lab::shared_memory
