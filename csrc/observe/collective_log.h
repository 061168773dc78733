// Which collectives this process enters, on whatever thread, how many bytes it gives them, and when they are complete.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp_lab {

// [Note: counting what a hook sends]
// While a log is open, each collective that passes ([Note: where every collective passes] in
// comm/collective_interception.h) is noted with its group and the bytes of its tensors, whoever starts it: a hook, or
// what runs when a future is complete, on a thread of the backend. They are what the hook hands over; what crosses the
// wire for it depends on the algorithm of the backend.
struct Collective {
  std::string name;                 // of the operator, e.g. "allreduce_"
  int ranks = 0;                    // of its group
  std::vector<std::int64_t> bytes;  // of each argument that holds tensors, in the order of the operator's arguments
  std::int64_t begin_ns = 0;        // host time at which it was entered
  std::int64_t end_ns = 0;          // its future was complete, as the host sees it; 0: it is not, or has no future
};

// Opens the log, which all threads share; each call wants one close_collective_log().
void open_collective_log();
void close_collective_log();
// What was entered since the log was opened, or since the last call.
std::vector<Collective> take_collectives();

}  // namespace ddp_lab
