#include "comm/shared_memory/work.h"

#include <pybind11/pybind11.h>

#include <utility>

namespace ddp_lab::shared_memory {

namespace {

constexpr std::chrono::milliseconds kLook{50};

thread_local std::function<void()> before_waiting;

}  // namespace

void look_for_signals() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

void run_before_waiting(std::function<void()> action) { before_waiting = std::move(action); }

Work::Work(int rank, c10d::OpType kind, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs, std::uint64_t number)
    : c10d::Work(rank, kind, title, inputs),
      outputs_(std::move(outputs)),
      number_(number),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (before_waiting && !isCompleted()) {
    before_waiting();
  }
  const Waiting waiting(*this, isCompleted());
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!cv_.wait_for(lock, kLook, [this] { return completed_; })) {
    lock.unlock();
    look_for_signals();
    lock.lock();
    if (timeout != kNoTimeout && !completed_ && std::chrono::steady_clock::now() - begin > timeout) {
      TORCH_CHECK(false, "Operation timed out!");
    }
  }
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

void Work::end(std::exception_ptr error) {
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
  finish(error);  // last: who waits may let the work go
}

Forwarded::Forwarded(int rank, c10d::OpType kind, const char* title, const std::vector<at::Tensor>& inputs,
                     c10::intrusive_ptr<c10d::Work> inner)
    : c10d::Work(rank, kind, title, inputs), inner_(std::move(inner)) {}

bool Forwarded::wait(std::chrono::milliseconds timeout) {
  const Waiting waiting(*this, isCompleted());
  bool done = false;
  try {
    done = inner_->wait(timeout);
  } catch (...) {
    finish(std::current_exception());
    throw;
  }
  finish();  // ends the span in a profile
  if (done && !has_future()) notify_end();
  return done;
}

}  // namespace ddp_lab::shared_memory
