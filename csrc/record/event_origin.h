// EventOrigin: whose events they are and in which step, the same for all of a model until that changes.
// Guarded by its owner's mutex.
#pragma once

#include <cstdint>

#include "record/event.h"

namespace ddp_lab {

struct EventOrigin {
  std::int32_t reducer = -1;        // the same on all ranks
  std::int32_t process_group = -1;  // of this rank
  std::uint16_t generation = 0;     // of the buckets
  std::int64_t step = 0;            // the coming (or running) synchronised backward

  Event event(Kind kind, std::int64_t host_ns = 0) const {
    Event made;
    made.kind = kind;
    made.host_ns = host_ns;
    made.reducer = reducer;
    made.process_group = process_group;
    made.generation = generation;
    made.step = step;
    return made;
  }
};

}  // namespace ddp_lab
