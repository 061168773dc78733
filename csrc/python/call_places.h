// Where a Python program calls a collective.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "observe/group_collectives.h"

namespace ddp_lab {

// A call, and its place; texts are empty where it has none.
struct PlacedCall {
  std::int32_t index = 0;
  Call call;
  std::string file{};  // of the user's innermost frame
  int line = 0;
  std::string function{};
  std::string module{};  // the parameters that fully_shard has it for: the name of their module
};

// A FindCall. Takes the GIL, so hold no lock.
std::int32_t find_call(const Call& call);

// Files that are not the user's begin with one of these.
void set_library_folders(std::vector<std::string> folders);

// Those that were given an index since the last call.
std::vector<PlacedCall> take_new_calls();

}  // namespace ddp_lab
