// Works of Gloo that another thread can abort.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp_lab {

// [Note: a work that Gloo forgets]
// Gloo tells an error on a connection to whoever waits for it, save for two: a send whose bytes are partly written or
// could not be written (`Pair::signalException` goes through the queue of what is to be written, but not through the
// unbound buffers in it, which are all that collectives use), and a receive whose bytes have come in part. Who waits
// for one of these waits until the timeout of the group, whatever happens to its sockets, and the work has no `abort`.
// It happens where ranks are interrupted, or die, while large tensors are on their way, and where a send meets a
// connection that its peer has just closed.
//
// So callers get a work of ours in place of Gloo's, made where the call passes the dispatcher, see [Note: where every
// collective passes]. It hands everything on, tells who watches the collective when a thread waits for it, and can be
// aborted: who waits for it gets an error. Gloo's own thread stays behind until the timeout of its group, with
// the tensors; whoever destroys such a group before waits for that thread. Its late word on the work reaches nobody:
// that is why the future has to be ours.

// From now on what collectives and point-to-point calls on Gloo return can be aborted. Any thread.
void make_gloo_abortable();

// How many collectives of this group Gloo has not completed; each has a thread of Gloo's. Any thread.
std::size_t count_gloo_works(const c10d::ProcessGroup& group);

// Aborts them, sends and receives, too: their waits and their futures fail with a RuntimeError that says `why`. Any
// thread. Returns how many collectives there were.
std::size_t abort_gloo_works(const c10d::ProcessGroup& group, const std::string& why);

// A send or a receive.
struct Message {
  bool sends = false;
  int peer = -1;        // rank in the group; -1: any
  std::string group{};  // its name
};

// The one that a thread waits for, by its number in Python: nothing else tells, as the handle may have no name there.
// Any thread.
std::optional<Message> awaited_message(unsigned long thread);

}  // namespace ddp_lab
