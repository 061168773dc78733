#include "comm/shared_memory/group.h"

#include <c10/core/ScalarType.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

namespace ddp_lab::shared_memory {

namespace {

constexpr int kSpins = 2000;       // some 20 us
constexpr int kSpinsCrowded = 50;  // who spins then keeps the others from what is waited for
constexpr int kYields = 20;
constexpr long kNapNanoseconds = 50'000'000;
constexpr std::size_t kFirstSlot = 4096;  // it begins at a multiple of that
constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

constexpr std::array<const char*, 9> kNames{"broadcast", "all_reduce", "reduce",     "all_gather", "reduce_scatter",
                                            "gather",    "scatter",    "all_to_all", "barrier"};
constexpr std::array<const char*, 8> kReductions{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // lasts about as long as x86's pause; `yield` does nothing on most cores
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Returns false if a signal came.
bool nap(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
  const timespec limit{0, kNapNanoseconds};
  const long done = syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
  return done == 0 || errno != EINTR;
}

bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter; }

bool reached(std::uint32_t stage, std::uint32_t round) { return static_cast<std::int32_t>(stage - round) >= 0; }

}  // namespace

// Between processes an atomic must be one instruction, not a lock in one of them. 128 bytes: two cache lines on x86-64,
// which fetches pairs, one on some aarch64.
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

struct alignas(128) Group::Member {
  // Rounds it has published; peers sleep on it. Its store publishes all that the rank has written for the round: its
  // slot, `calls`, `places`, its data in its pool; and that it has finished reading what the others wrote for the round
  // before. Peers load it with acquire. The store and the loads around `sleepers` are sequentially consistent: either
  // the rank sees who is about to sleep, or that one sees the new stage.
  std::atomic<std::uint32_t> stage;
  std::atomic<std::uint32_t> sleepers;  // how many sleep on `stage`, or are about to: publishes nothing, see there
  std::array<Call, 2> calls;            // by the operation's number
  std::array<std::uint64_t, 2> places;  // likewise: of its data in the rank's pool; kNowhere: not there
};

struct alignas(128) Group::Shared {
  // 0: whole, 1: its reason is being written, 2: broken. The store of 2, with release, publishes `why`; loaded with
  // acquire. A rank that misses it and sleeps wakes after kNapNanoseconds.
  std::atomic<std::uint32_t> state;
  std::array<char, 500> why;
};

std::size_t Group::bytes_for(int size) {
  const std::size_t head = sizeof(Shared) + static_cast<std::size_t>(size) * sizeof(Member);
  return (head + kFirstSlot - 1) / kFirstSlot * kFirstSlot + 2 * static_cast<std::size_t>(size) * kSlotBytes;
}

Group::Group(std::shared_ptr<const Segment> segment, int rank, const std::vector<int>& pids, std::vector<int> global,
             std::vector<PoolView> pools)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(static_cast<int>(pids.size())),
      global_(std::move(global)),
      spins_(static_cast<unsigned>(size_) > std::thread::hardware_concurrency() ? kSpinsCrowded : kSpins),
      peers_(pids, segment_->descriptor()),
      pools_(std::move(pools)) {}

Group::Shared& Group::shared() const { return *reinterpret_cast<Shared*>(segment_->data()); }

Group::Member& Group::member(int rank) const {
  return reinterpret_cast<Member*>(segment_->data() + sizeof(Shared))[rank];
}

std::byte* Group::slot(int rank, std::uint32_t round) const {
  const std::size_t first = bytes_for(size_) - 2 * static_cast<std::size_t>(size_) * kSlotBytes;
  return segment_->data() + first + (2 * static_cast<std::size_t>(rank) + round % 2) * kSlotBytes;
}

void Group::enter(Call call, const void* data) {
  if (broken()) {
    throw_broken();
  }
  call.number = call_.number + 1;
  call_ = call;
  compared_ = false;
  std::optional<std::size_t> place;
  if (data != nullptr && has_pools()) {
    place = Pool::own()->offset_of(data, call.bytes);
  }
  Member& own = member(rank_);
  own.calls[call.number % 2] = call;
  own.places[call.number % 2] = place.value_or(kNowhere);
}

std::uint64_t Group::place_on(int rank) const { return member(rank).places[call_.number % 2]; }

bool Group::in_own_pool() const { return place_on(rank_) != kNowhere; }

bool Group::in_all_pools() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (place_on(rank) == kNowhere) {
      return false;
    }
  }
  return true;
}

bool Group::in_some_pool() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (place_on(rank) != kNowhere) {
      return true;
    }
  }
  return false;
}

const std::byte* Group::in_pool_of(int rank) const {
  return pools_[static_cast<std::size_t>(rank)].get() + place_on(rank);
}

void Group::barrier(const WaitPolicy& policy) {
  ++rounds_;
  Member& own = member(rank_);
  own.stage.store(rounds_, std::memory_order_seq_cst);
  if (own.sleepers.load() != 0) {
    wake(own);
  }
  for (int peer = 1; peer < size_; ++peer) {
    const int rank = (rank_ + peer) % size_;
    wait_for(rank, policy);
    if (!compared_) {
      compare(rank);
    }
  }
  compared_ = true;
}

void Group::wait_for(int rank, const WaitPolicy& policy) {
  Member& peer = member(rank);
  for (int i = 0; i < spins_; ++i) {
    if (reached(peer.stage.load(std::memory_order_acquire), rounds_)) {
      return;
    }
    relax();
  }
  for (int i = 0; i < kYields; ++i) {
    if (reached(peer.stage.load(std::memory_order_acquire), rounds_)) {
      return;
    }
    sched_yield();
  }
  while (true) {
    peer.sleepers.fetch_add(1);
    const std::uint32_t seen = peer.stage.load();
    const bool there = reached(seen, rounds_);
    if (!there && !broken()) {
      nap(peer.stage, seen);
    }
    peer.sleepers.fetch_sub(1);
    if (there) {
      return;
    }
    if (!reached(peer.stage.load(std::memory_order_acquire), rounds_)) {
      check(rank, policy);
    }
  }
}

void Group::check(int rank, const WaitPolicy& policy) {
  if (broken()) {
    throw_broken();
  }
  if (peers_.ended(rank) && !reached(member(rank).stage.load(std::memory_order_acquire), rounds_)) {
    fail(name(rank) + " ended while " + name(rank_) + " waited for it in " + words(call_));
  }
  if (std::chrono::steady_clock::now() > policy.deadline) {
    fail("Timed out waiting " + std::to_string(policy.timeout.count()) + "ms: " + name(rank_) + " waited for " +
         name(rank) + " in " + words(call_));
  }
  if (policy.look) {
    try {
      policy.look();
    } catch (...) {
      break_off(name(rank_) + " was interrupted in " + words(call_));
      throw;
    }
  }
}

// "all_reduce #3 of 1024 B of float (SUM)"
std::string Group::words(const Call& call) const {
  std::ostringstream text;
  text << kNames.at(static_cast<std::size_t>(call.kind)) << " #" << call.number;
  if (call.kind != Kind::kBarrier) {
    text << " of " << call.bytes << " B of " << c10::toString(static_cast<c10::ScalarType>(call.dtype));
  }
  if (reduces(call.kind)) {
    text << " (" << kReductions.at(call.reduction) << ")";
  }
  if (call.root >= 0) {
    text << (call.kind == Kind::kReduce || call.kind == Kind::kGather ? " to " : " from ") << name(call.root);
  }
  return text.str();
}

void Group::compare(int rank) {
  const Call theirs = member(rank).calls[call_.number % 2];
  if (theirs != call_) {
    fail("ranks called different operations: " + name(rank_) + " " + words(call_) + ", " + name(rank) + " " +
         words(theirs));
  }
}

void Group::break_off(const std::string& why) {
  std::uint32_t whole = 0;
  if (shared().state.compare_exchange_strong(whole, 1, std::memory_order_relaxed)) {
    const std::size_t length = std::min(why.size(), shared().why.size() - 1);
    std::memcpy(shared().why.data(), why.data(), length);
    shared().why[length] = '\0';
    shared().state.store(2, std::memory_order_release);
  }
  for (int rank = 0; rank < size_; ++rank) {
    wake(member(rank));
  }
}

bool Group::broken() const { return shared().state.load(std::memory_order_acquire) == 2; }

void Group::wake(Member& member) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&member.stage), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Group::fail(const std::string& why) {
  break_off(why);
  throw_broken();
}

void Group::throw_broken() const {
  for (int i = 0; i < kYields && !broken(); ++i) {  // another rank is just writing why, or died while it did
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw GroupError(std::string("shm: ") + (broken() ? shared().why.data() : "the group was aborted by another rank"));
}

}  // namespace ddp_lab::shared_memory
