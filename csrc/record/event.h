// One timestamped event about a backward: fixed size, plain data, the unit of the recorder and of the wire.
//
// Python reads the same bytes as a numpy array of `ddp_lab.protocol.events.DTYPE`; a test compares both layouts.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ddp_lab {

// Increase when a field of Event or the meaning of a kind changes.
inline constexpr std::uint16_t kSchemaVersion = 1;

// Which event. The order of one synchronised backward on one rank:
//   forward_begin, forward_end, backward_begin, grad_ready*, bucket_ready, bucket_launched, bucket_reduced
//   (the last two from other threads as well), finalize_begin, backward_end.
enum class Kind : std::uint8_t {
  kNone = 0,
  kForwardBegin = 1,
  kForwardEnd = 2,
  kBackwardBegin = 3,   // the first gradient of an output of forward is known
  kGradReady = 4,       // parameter, bucket, bytes: the gradient has been accumulated
  kBucketReady = 5,     // the last gradient of the bucket has arrived
  kBucketLaunched = 6,  // the collective (or the comm hook) has been started
  kBucketReduced = 7,   // host: the future of the bucket has completed
  kFinalizeBegin = 8,   // the backward's own computation is over; what is not reduced now is exposed
  kBackwardEnd = 9,     // every bucket has been written back to the gradients
  kMark = 10,           // recording.mark(name): parameter holds the name's index
  kRebuilt = 11,        // buckets were assigned anew; generation holds the new assignment's number
  kDeviceSpan = 12,     // device_begin_ns, device_end_ns of a bucket's collective, resolved after the event
  kAbandoned = 13,      // the backward did not finish; its gradients are discarded
  // Parts of the program outside of models: parameter holds the index of a place, see recording.place().
  kActivity = 14,  // from device_begin_ns (a host time here) to host_ns the main thread was there
  kSample = 15,    // a look at the main thread found it there
  // One operation of a process group, whoever started it (see observe/group_collectives.h). process_group: of this
  // rank; step: its number in the group, which is equal on all members (a send's or receive's: among those of this
  // group with the same peer and direction); bucket: the peer's rank in the group, -1 for a collective; parameter:
  // index of its description of type "call"; bytes: of its input or its output, whichever is more. All have the same.
  kCollectiveEntered = 16,
  kCollectiveEnded = 17,   // host: its future has completed; device times where it ran on a device
  kCollectiveFailed = 18,  // with an error
  kWaitBegin = 19,         // a thread of the host waits for it; only of `Work` that tells (gloo, shm)
  kWaitEnd = 20,    // with device times: in between a stream that computes waited; host_ns: when the host came to it
  kEndUnseen = 21,  // in the place of an end: nothing tells when it ends
};

// Whether it is about an operation of a process group: its step and bucket are not those of a model.
constexpr bool is_of_group(Kind kind) { return kind >= Kind::kCollectiveEntered; }

// A field that does not apply holds -1 (signed) or 0 (device times).
struct Event {
  std::uint64_t sequence = 0;        // rank-local, consecutive from 0; filled in by the recorder
  std::int64_t host_ns = 0;          // CLOCK_MONOTONIC, one axis for all processes of a host; filled in if 0
  std::int64_t device_begin_ns = 0;  // on the host's axis, as well as device events can be placed on it
  std::int64_t device_end_ns = 0;
  std::int64_t bytes = -1;
  std::int64_t step = -1;           // index of the synchronised backward of this reducer
  std::int32_t reducer = -1;        // the same on all ranks of the reducer's group, never reused
  std::int32_t process_group = -1;  // index of the process group on this rank, never reused
  std::int32_t bucket = -1;
  std::int32_t parameter = -1;  // index in the reducer's order of registration
  Kind kind = Kind::kNone;
  std::uint8_t reserved = 0;
  std::uint16_t generation = 0;  // which assignment of buckets `bucket` refers to
  std::uint32_t thread = 0;      // small index of the recording thread on this rank
};

static_assert(sizeof(Event) == 72 && std::is_trivially_copyable_v<Event>);

}  // namespace ddp_lab
