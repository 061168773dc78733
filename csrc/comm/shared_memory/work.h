// One operation that was given to a shared-memory group.
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/collective_interception.h"

namespace ddp_lab::shared_memory {

// Lets a thread that waits raise what the user's interrupt means in Python; without effect on other threads.
void look_for_signals();

// This thread does so before it waits for a work that has not ended: without it, it would wait for itself.
void run_before_waiting(std::function<void()> action);

class Work : public c10d::Work, public ReportsWaits {
 public:
  Work(int rank, c10d::OpType kind, const char* title, const std::vector<at::Tensor>& inputs,
       std::vector<at::Tensor> outputs, std::uint64_t number);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  std::uint64_t getSequencenumber() const override { return number_; }

  // Called once, by the thread that executed it.
  void end(std::exception_ptr error);

 private:
  std::vector<at::Tensor> outputs_;
  std::uint64_t number_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// One that the Gloo group within executes; a profile shows it under `title`.
class Forwarded : public c10d::Work, public ReportsWaits {
 public:
  Forwarded(int rank, c10d::OpType kind, const char* title, const std::vector<at::Tensor>& inputs,
            c10::intrusive_ptr<c10d::Work> inner);

  bool has_future() const override { return !c10d::isP2POp(inner_->retrieveOpType()); }
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  std::uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
};

}  // namespace ddp_lab::shared_memory
