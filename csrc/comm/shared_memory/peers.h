// Whether the other ranks of a group still live.
//
// [Note: signs of life]
// A rank that knows the process of another one holds a pidfd of it. Where process ids mean nothing (ranks in containers
// that have their own) or the kernel gives no pidfd, each rank holds a lock on its byte of the segment's file, which
// the kernel gives up with the last copy of the rank's descriptor: when it has ended, and what it had forked too.
#pragma once

#include <vector>

namespace ddp_lab::shared_memory {

class Peers {
 public:
  // The lock of rank `rank` on the segment that is open as `descriptor`, for others to see that it lives. Throws
  // std::system_error if that is not possible, or the rank is there already.
  static void hold(int descriptor, int rank);

  // Of all ranks. This process's own id: a thread of it, which doesn't end alone; 0: the rank holds a lock on
  // `descriptor`, which stays open. Throws std::system_error.
  Peers(const std::vector<int>& pids, int descriptor);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  bool ended(int rank) const;

 private:
  int descriptor_;
  std::vector<int> processes_;  // pidfds
};

}  // namespace ddp_lab::shared_memory
