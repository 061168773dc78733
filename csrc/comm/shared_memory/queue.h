// The operations of one group, one after the other: on the caller's thread or on one of its own.
//
// Owners: the queue and `executing_` belong to `mutex_`; the group to the thread that executes, which is the worker, or
// the caller of an operation that it waits for anyway, if nothing is queued: that saves two switches between threads.
//
// [Note: operations in callbacks]
// What is chained to a future runs on the worker, and may call further operations and wait for them (PowerSGD does).
// They run at once, before what is queued: the same place in all ranks' order that they have where the future had ended
// before anything was chained to it, and the caller itself calls them. Where one waits for a work that is still queued,
// the worker executes the queue first.
//
// [Note: who holds an interrupt]
// An interrupt is a Python exception: by its traceback it holds the frames that it went through, and so what called the
// operation: the work, and the group. A work that held it would be held by itself, in a circle that Python's collector
// can't see. So the caller gets the interrupt, and the work an error in words.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/shared_memory/group.h"
#include "comm/shared_memory/work.h"

namespace ddp_lab::shared_memory {

struct Operation {
  c10d::OpType kind;
  const char* title;  // in profiles and logs: "shm:broadcast"
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::chrono::milliseconds timeout;  // of the queue, unless it is positive
  bool asynchronous;                  // the caller does not wait for it
  std::function<void(const WaitPolicy&)> run;
};

class Queue {
 public:
  Queue(Group& group, std::chrono::milliseconds timeout);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Runs the operation in its turn. `name`: c10d's, of the group.
  c10::intrusive_ptr<Work> give(Operation operation, const std::string& name);

  void set_timeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds timeout();
  std::uint64_t given();

 private:
  struct Task {
    std::function<void(const WaitPolicy&)> run;
    c10::intrusive_ptr<Work> work;
    std::chrono::milliseconds timeout;
    std::uint64_t flight = 0;
  };

  // Returns the interrupt that ended it, for who called it.
  std::exception_ptr execute(Task& task, bool interruptible);
  void serve();
  void execute_first(std::unique_lock<std::mutex>& lock);

  Group& group_;
  const int pid_;
  const std::uint64_t made_;  // its number among the groups of this process

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool executing_ = false;
  bool stopping_ = false;
  std::uint64_t given_ = 0;
  std::chrono::milliseconds timeout_;
  std::thread worker_;  // started with the first operation that nobody waits for
};

}  // namespace ddp_lab::shared_memory
