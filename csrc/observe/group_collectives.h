// Records every operation of every process group: kCollectiveEntered and what follows it, see record/event.h.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/collective_interception.h"
#include "reduce/device_spans.h"

namespace ddp_lab {

// [Note: what a collective costs where it is recorded]
// Two events of 35 ns (four where a thread waits for it), the group's number and the place in the program from tables,
// and one small object that goes with the `Work`. The place needs the GIL, which the caller has just let go: the frames
// of this thread are read up to the first one of the user's, see python/call_places.cpp. Texts are made once for each
// place. While the recorder is off it is one branch and the count of the group, which must stay that of the other
// ranks.

// What is the same in each call from one place of the program.
struct Call {
  const char* operation = "";  // of c10d, without "c10d::"
  int dtype = -1;              // at::ScalarType; -1: it has no tensor
  int reduction = -1;          // c10d::ReduceOp::RedOpType; -1: it reduces nothing
  std::int32_t reducer = -1;   // the model and bucket that it is for; -1: of none that is known
  std::int32_t bucket = -1;
  Use use = Use::kNotSaid;

  bool operator==(const Call&) const = default;
};

// Returns the index of this call from where this thread is, the same for the same place; -1: it can't be told.
using FindCall = std::int32_t (*)(const Call& call);

// From now on every operation is recorded, while the recorder is on. It stays. Any thread.
void record_group_collectives(FindCall find_call);

// A collective that a device runs while its other streams compute. [Note: waits of a device] Who waits for it is a
// stream, and only the program knows where it does: it says so, before and after.
class DeviceCollective {
 public:
  DeviceCollective(const Event& entered, c10::Device device) : event_(entered), device_(device) {}

  // From here on the current stream of the device waits for it. Until `wait_ends`, on the same stream.
  void wait_begins();
  void wait_ends();

 private:
  const Event event_;
  const c10::Device device_;
  std::shared_ptr<DeviceSpans::Span> wait_;
};

// Those that this thread has entered for a `Use` since the last call, the oldest first.
std::vector<std::shared_ptr<DeviceCollective>> take_device_collectives();

// This rank's number for a process group: the same for the same group, never reused.
std::int32_t index_of_group(const c10d::ProcessGroup& group);
// The group no longer exists: another one may be at its address.
void forget_group(std::int32_t index);

// Groups that were given a number since the last call.
struct NamedGroup {
  std::int32_t index = 0;
  std::string name;         // c10d's
  std::string description;  // c10d's
  std::string backend;
  int size = 0;
};
std::vector<NamedGroup> take_new_groups();

}  // namespace ddp_lab
