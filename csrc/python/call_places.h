// Where a Python program calls a collective.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "observe/group_collectives.h"

namespace ddp_lab {

// A FindCall. Takes the GIL, so hold no lock.
std::int32_t find_call(const Call& call);

// Files that are not the user's begin with one of these.
void set_library_folders(std::vector<std::string> folders);

// The names of what a collective is for, in the order of `Use`.
extern const std::array<const char*, 8> kUses;

// Descriptions (JSON of type "call") of those that were given an index since the last call: operation, dtype,
// reduction, use, the model and bucket that it is for, the user's innermost frame, and the module whose parameters
// fully_shard has it for. What does not apply is left out.
std::vector<std::string> take_new_calls();

}  // namespace ddp_lab
