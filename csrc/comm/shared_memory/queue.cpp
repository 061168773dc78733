#include "comm/shared_memory/queue.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "comm/flight_log.h"

namespace ddp_lab::shared_memory {

Queue::Queue(Group& group, std::chrono::milliseconds timeout)
    : group_(group), pid_(getpid()), made_(FlightLog::of_process().new_group()), timeout_(timeout) {}

Queue::~Queue() {
  if (!worker_.joinable()) {
    return;
  }
  if (getpid() != pid_) {  // a fork has no worker
    worker_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (executing_ || !queue_.empty()) {
      group_.break_off(group_.name(group_.rank()) + " destroyed the group with operations in flight");
    }
  }
  changed_.notify_all();
  std::optional<pybind11::gil_scoped_release> no_gil;  // the worker needs the GIL to let go of tensors of Python's
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) no_gil.emplace();
  worker_.join();
}

void Queue::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  timeout_ = timeout;
}

std::chrono::milliseconds Queue::timeout() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return timeout_;
}

std::uint64_t Queue::given() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return given_;
}

c10::intrusive_ptr<Work> Queue::give(Operation operation, const std::string& name) {
  Flight flight = begin_flight(operation.title, operation.inputs);
  std::unique_lock<std::mutex> lock(mutex_);
  ++given_;
  flight.group = name;
  flight.made = made_;
  flight.sequence = given_;
  auto work = c10::make_intrusive<Work>(group_.rank(), operation.kind, operation.title, operation.inputs,
                                        std::move(operation.outputs), given_);
  Task task{std::move(operation.run), work, operation.timeout.count() > 0 ? operation.timeout : timeout_,
            FlightLog::of_process().note(std::move(flight))};
  if (std::this_thread::get_id() == worker_.get_id()) {  // see [Note: operations in callbacks]
    lock.unlock();
    execute(task, false);
    return work;
  }
  if (!operation.asynchronous && !executing_ && queue_.empty()) {
    executing_ = true;
    lock.unlock();
    const std::exception_ptr interrupted = execute(task, true);
    lock.lock();
    executing_ = false;
    if (!queue_.empty()) {
      changed_.notify_one();
    }
    if (interrupted) {
      std::rethrow_exception(interrupted);
    }
    return work;
  }
  queue_.push_back(std::move(task));
  if (!worker_.joinable()) {
    worker_ = std::thread([this] { serve(); });
  }
  changed_.notify_one();
  return work;
}

std::exception_ptr Queue::execute(Task& task, bool interruptible) {
  const auto deadline = std::chrono::steady_clock::now() + task.timeout;
  FlightLog::of_process().reached(task.flight, Flight::State::kStarted);
  std::exception_ptr error;
  std::exception_ptr interrupted;
  try {
    task.run({deadline, task.timeout, interruptible ? look_for_signals : nullptr});
  } catch (const GroupError& failed) {
    error = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, failed.what()));
  } catch (const pybind11::error_already_set&) {  // see [Note: who holds an interrupt]
    interrupted = std::current_exception();
    error = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, "shm: the operation was interrupted"));
  } catch (...) {
    error = std::current_exception();
  }
  task.run = nullptr;
  FlightLog::of_process().reached(task.flight, Flight::State::kEnded);
  task.work->end(error);
  return interrupted;
}

void Queue::serve() {
  pthread_setname_np(pthread_self(), "shm");
  run_before_waiting([this] {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!queue_.empty()) {
      execute_first(lock);
    }
  });
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || (!queue_.empty() && !executing_); });
    if (queue_.empty()) {
      return;
    }
    executing_ = true;
    execute_first(lock);
    executing_ = false;
  }
}

void Queue::execute_first(std::unique_lock<std::mutex>& lock) {
  Task task = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  execute(task, false);
  task.work.reset();
  lock.lock();
}

}  // namespace ddp_lab::shared_memory
