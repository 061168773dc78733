// Every operation of c10d on its way through the dispatcher, and who watches it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace ddp_lab {

// [Note: where every collective passes]
// Whoever communicates (torch.distributed's functions, torch's reducer and ours, fully_shard, DTensor, functional
// collectives, compiled regions) calls a method of ProcessGroup, and that calls an operator of c10d. Kernels of ours
// stand in front of the backends' there (under BackendSelect, the last key before them), and stay. That is the same on
// each torch from 2.11 on. The hooks of ProcessGroup that torch has from 2.14.1 on are called at the same place, so
// they see nothing more, and that a collective failed is what its future says. So there is one way for all versions.
//
// What does not pass: a process group that is written in Python and answers itself; the end of a batch that a backend
// coalesces (`startCoalescing`), whose parts do; and our own reducer's collectives over shared memory, which reports
// them with `watch`.

// What a collective is for: in a step where parameters are sharded, or the broadcast of a model's buffers. Their names
// are in python/call_places.cpp.
enum class Use : std::uint8_t {
  kNotSaid,
  kForward,
  kForwardAhead,
  kBackward,
  kBackwardAhead,
  kReduction,
  kEvaluation,
  kBuffers
};

// What this thread starts a collective for: a bucket of a model.
struct Purpose {
  std::int32_t reducer = -1;
  std::int32_t bucket = -1;
  Use use = Use::kNotSaid;
};

// One operation that is about to be started.
struct CollectiveCall {
  const char* operation;  // of c10d, without "c10d::"; lives forever
  const c10d::ProcessGroup& group;
  std::array<std::int64_t, 3> argument_bytes{-1, -1, -1};  // of the arguments that hold tensors, in their order
  std::size_t arguments = 0;                               // how many of them there are
  at::Tensor first{};                                      // the first tensor of them; undefined if there is none
  int reduction = -1;                                      // c10d::ReduceOp::RedOpType
  int peer = -1;                                           // of a send or receive: rank in the group; -1: any
  const at::Tensor* summed = nullptr;                      // the tensor of an all-reduce of one
  Purpose purpose{};

  void add(std::int64_t bytes) {
    if (bytes >= 0 && arguments < argument_bytes.size()) argument_bytes[arguments++] = bytes;
  }
  // Of what goes in or of what comes out, whatever is more.
  std::int64_t bytes() const { return *std::max_element(argument_bytes.begin(), argument_bytes.end()); }
};

// What one watcher sees of one operation. Any thread; kept as long as the operation.
class Watch {
 public:
  virtual ~Watch() = default;
  // Whether `ended` runs on a stream of the future's devices, behind the operation.
  virtual bool on_device() const { return false; }
  // Once. `failed`: with an error.
  virtual void ended(bool failed) = 0;
  // In the place of `ended`: nothing tells when it ends. The `Work` of a foreign backend without a future.
  virtual void ends_unseen() {}
  // A thread of the host waits until it has ended, or no longer does. Only of `Work` that tells.
  virtual void wait_begins() {}
  virtual void wait_ends() {}
};
using Watches = std::vector<std::shared_ptr<Watch>>;

// Returns null for what it does not watch; may fill in the purpose.
using Watcher = std::shared_ptr<Watch> (*)(CollectiveCall& call);
// Who watches, in the order in which they are asked: the first one knows what an operation is for.
enum class Role : std::uint8_t { kSeesLaunches, kLogs, kRecords };
// From now on it is asked about each operation. It stays. Any thread.
void set_watcher(Role role, Watcher watcher);

// For what does not pass the dispatcher: asks the watchers, then follows the `Work`.
Watches watch(CollectiveCall& call);
void follow(Watches watches, c10d::Work& work);

// From now on, what this thread starts is for that. Returns what it was for before.
Purpose set_purpose(Purpose purpose);

// While it exists, what this thread starts is for that.
class WithPurpose {
 public:
  explicit WithPurpose(Purpose purpose);
  ~WithPurpose();
  WithPurpose(const WithPurpose&) = delete;
  WithPurpose& operator=(const WithPurpose&) = delete;

 private:
  const Purpose before_;
};

// A `Work` of ours, which tells its watches when a thread waits for it.
class ReportsWaits {
 public:
  virtual ~ReportsWaits() = default;
  // Before the `Work` is given to its caller.
  void tell(const Watches& watches) { watches_ = watches; }
  // Gloo's sends and receives have none: that they have ended is known when somebody has waited for them.
  virtual bool has_future() const { return true; }

 protected:
  void notify_end() const {
    for (const auto& one : watches_) one->ended(false);
  }

  class Waiting {
   public:
    Waiting(const ReportsWaits& work, bool over) : watches_(over ? nullptr : &work.watches_) {
      if (watches_ == nullptr) return;
      for (const auto& one : *watches_) one->wait_begins();
    }
    ~Waiting() {
      if (watches_ == nullptr) return;
      for (const auto& one : *watches_) one->wait_ends();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    const Watches* const watches_;
  };

 private:
  Watches watches_;
};

// Puts the kernels there. They stay. Any thread.
void install_interceptors();
// What callers get in the place of the `Work` that a backend made; null: as it is. See abortable_work.h.
// `peer`: as that of `CollectiveCall`.
using Replace = c10::intrusive_ptr<c10d::Work> (*)(c10::intrusive_ptr<c10d::Work> made, const c10d::ProcessGroup& group,
                                                   int peer);
void replace_works(Replace replace);

}  // namespace ddp_lab
