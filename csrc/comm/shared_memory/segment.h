// Memory that the ranks of a group share: anonymous, so that no other user can guess its name and nothing is left of it
// after a crash. Peers open it through /proc/PID/fd, which also works where /dev/shm is small. Where the kernel forbids
// that, it has a name for a moment.
//
// [Note: signs of life]
// A rank that knows the process of another one holds a pidfd of it. Where process ids mean nothing (ranks in containers
// that have their own) or the kernel gives no pidfd, each rank holds a lock on its byte of the segment's file, which
// the kernel gives up with the last copy of the rank's descriptor: when it has ended, and what it had forked too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ddp_lab::shared_memory {

class Segment {
 public:
  // Makes one of `bytes` zero bytes; pages cost memory when they are first written.
  static Segment create(std::size_t bytes);

  enum class Access { kRead, kWrite };

  // Maps the one that process `pid` has open as `descriptor`. Throws std::system_error if that is not allowed, and
  // std::runtime_error if it has another size.
  static Segment attach(int pid, int descriptor, std::size_t bytes, Access access = Access::kWrite);

  // The same with a name as of shm_open, which must be new: only this user may open it. All its pages are there at
  // once, because a /dev/shm that is full would kill who writes to a missing one. Throws std::system_error.
  static Segment create_named(const std::string& name, std::size_t bytes);

  // Maps that one. Throws std::runtime_error if another user owns it or may open it, or it has another size.
  static Segment attach_named(const std::string& name, std::size_t bytes);

  // Takes the name away; without effect if another rank has.
  static void unlink(const std::string& name);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  int descriptor() const { return descriptor_; }

  // Once all peers have attached: the mapping stays.
  void close_descriptor();

 private:
  // Owns it: it is closed if what follows fails.
  explicit Segment(int descriptor) : descriptor_(descriptor) {}
  void map(std::size_t bytes, Access access = Access::kWrite);

  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Whether the other ranks of a group still live.
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
