// What the ranks of one group share, and how they go through it together.
//
// [Note: rounds]
// Ranks meet in rounds. In a round each rank writes into its own slot, publishes, waits until all have published, and
// then reads the slots of the others. Every rank has two slots and uses them in turn: who writes into a slot again, two
// rounds later, has seen all others publish the round between, before which they had finished reading. So one wait a
// round is enough.
//
// [Note: how a rank waits]
// It looks for some microseconds, then lets others run, then sleeps on a futex: there may be more ranks than cores, and
// a rank's own backward needs one. Asleep, it wakes now and then to see whether a peer has died, its time is over, or
// the user has interrupted it.
//
// Owner: the thread that executes operations; `break_off` and `broken` may be called by any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/shared_memory/pool.h"
#include "comm/shared_memory/segment.h"

namespace ddp_lab::shared_memory {

enum class Kind : std::uint8_t {
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
};

// What a rank says of the operation that it enters; all ranks must say the same.
struct Call {
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  std::int32_t root = -1;
  Kind kind = Kind::kBarrier;
  std::uint8_t dtype = 0;
  std::uint8_t reduction = 0;
  std::uint8_t unused = 0;

  bool operator==(const Call&) const = default;
};

// The group can't be used any more; the message says why.
class GroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How long an operation may take, and what is done now and then while it waits.
struct WaitPolicy {
  std::chrono::steady_clock::time_point deadline;
  std::chrono::milliseconds timeout;
  std::function<void()> look;  // may throw, which ends the operation
};

class Group {
 public:
  static constexpr std::size_t kSlotBytes = std::size_t{1} << 20;  // holds twice what collectives.cpp puts into one

  static std::size_t bytes_for(int size);

  // `pids`: of all ranks, to see when one dies; see Peers. `global`: their numbers in the job, by which messages call
  // them. `pools`: of all ranks, or none. Ranks that are threads may share one segment, which begins as zeros.
  Group(std::shared_ptr<const Segment> segment, int rank, const std::vector<int>& pids, std::vector<int> global,
        std::vector<PoolView> pools);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // "rank 3": as the program counts, which may not know its number in the group.
  std::string name(int rank) const { return "rank " + std::to_string(global_.at(static_cast<std::size_t>(rank))); }

  // Enters an operation; its number is set here. Ranks that have its `data` in their pools say so; null: not.
  void enter(Call call, const void* data = nullptr);

  // Of the operation, for this rank; then, after its first round, for all ranks and for some of them.
  bool in_own_pool() const;
  bool in_all_pools() const;
  bool in_some_pool() const;

  // The operation's data on `rank`, where it is in that rank's pool.
  const std::byte* in_pool_of(int rank) const;

  // Whether tensors in the pools are reduced without a copy.
  bool has_pools() const { return !pools_.empty(); }

  // Where this rank writes in the coming round.
  std::byte* own_slot() { return slot(rank_, rounds_ + 1); }

  // Publishes it and waits for all; throws GroupError, or what `policy.look` does.
  void barrier(const WaitPolicy& policy);

  // What `rank` wrote in the round that has been met in.
  const std::byte* slot_of(int rank) { return slot(rank, rounds_); }

  // Ends what any rank is in, with this reason, and every later operation.
  void break_off(const std::string& why);
  bool broken() const;

  // Breaks the group off and throws GroupError.
  [[noreturn]] void fail(const std::string& why);

 private:
  struct Shared;
  struct Member;

  Shared& shared() const;
  Member& member(int rank) const;
  std::byte* slot(int rank, std::uint32_t round) const;
  std::uint64_t place_on(int rank) const;
  void wait_for(int rank, const WaitPolicy& policy);
  void check(int rank, const WaitPolicy& policy);
  void compare(int rank);
  std::string words(const Call& call) const;
  void wake(Member& member);
  [[noreturn]] void throw_broken() const;

  const std::shared_ptr<const Segment> segment_;
  int rank_;
  int size_;
  std::vector<int> global_;
  int spins_;
  Peers peers_;
  std::vector<PoolView> pools_;
  std::uint32_t rounds_ = 0;
  Call call_;
  bool compared_ = true;
};

}  // namespace ddp_lab::shared_memory
