// The one thread of a process that calls MPI: it starts operations, and looks after those that are on their way.
//
// [Note: one thread for MPI]
// MPI need not allow calls from several threads (MPI_THREAD_SERIALIZED suffices), and what begins it must end it. So
// one thread does all of it, and nothing it calls waits: an operation is started in MPI's non-blocking form and tested
// until it is done. Two ranks that send to each other, or groups that overlap, so never wait for each other forever.
// Of one group's collectives only one is on its way at a time: a callback of its future runs on this thread and may
// call collectives, which then have the same place in all ranks' order. They run at once, and are done when the call
// returns.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/shared_memory/work.h"
#include "mpi/calls.h"

namespace ddp_lab::mpi {

using shared_memory::Work;
using Requests = std::vector<MPI_Request>;
using Statuses = std::vector<MPI_Status>;

struct Operation;

// A group's communicator and the turns of its collectives. All but `aborted` belongs to MPI's thread.
struct Lane {
  MPI_Comm communicator = MPI_COMM_NULL;
  std::atomic<bool> aborted = false;
  std::string broken;  // why nothing works any more
  bool busy = false;
  std::deque<Operation> waiting;
};

struct Operation {
  std::function<Requests()> start;
  std::function<void(const Statuses&)> finish;
  c10::intrusive_ptr<Work> work;
  std::shared_ptr<Lane> lane;
  bool in_turn = true;  // false: to one peer alone, beside collectives
  std::chrono::milliseconds timeout{};
};

class Progress {
 public:
  static Progress& of_process();

  // Begins MPI if nobody has; callers may call it as often as they like.
  void begin();
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Runs `action` on MPI's thread and waits for it; raises what it raises.
  void call(std::function<void()> action);
  void give(Operation operation);
  // Looks at `Lane::aborted` soon.
  void wake();
  // Ends MPI if it was begun here; to be called once, last. False: something is still on its way, so MPI was left
  // alone.
  bool end(std::chrono::milliseconds patience);

 private:
  struct Flying {
    Operation operation;
    Requests requests;
    std::chrono::steady_clock::time_point deadline;
    bool within_callback = false;
    bool ended = false;
  };
  using Pointer = std::shared_ptr<Flying>;

  void serve();
  bool step();
  void pause();
  bool take();
  bool start_waiting();
  bool test();
  Pointer start(Operation operation, bool within_callback);
  void finish(const Pointer& flying, std::exception_ptr error, const Statuses& statuses);
  void drain();
  void check_process() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> actions_;
  std::deque<Operation> given_;
  bool woken_ = false;
  bool stopping_ = false;

  // Of MPI's thread:
  std::vector<Pointer> flying_;
  std::vector<Pointer> abandoned_;  // MPI may still write into their tensors
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::chrono::steady_clock::time_point moved_;

  std::thread thread_;
  int pid_ = 0;
  int rank_ = -1;
  int size_ = -1;
  bool ours_ = false;
};

}  // namespace ddp_lab::mpi
