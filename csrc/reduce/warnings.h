// Warnings to the user, at the line of the program that they are about.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace ddp_lab {

// Warns at the innermost line of the program on this thread; may throw what the user has made of warnings.
using Warn = void (*)(const std::string& text);

inline std::atomic<Warn> warn_at_line{nullptr};

// What is to be said when no lock is held any more: Python may run then. Any thread.
class Warnings {
 public:
  void add(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_.push_back(std::move(text));
    waiting_ = true;
  }

  bool waiting() const noexcept { return waiting_; }

  // True if there were any.
  bool forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_.clear();
    return waiting_.exchange(false);
  }

  // To be called without a lock. If one throws, the others wait for the next call. Where nothing of Python is there, as
  // in a test of C++, torch warns.
  void say() {
    while (const std::optional<std::string> text = take()) {
      if (const Warn warn = warn_at_line.load()) {
        warn(*text);
      } else {
        TORCH_WARN(*text);
      }
    }
  }

 private:
  std::optional<std::string> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (texts_.empty()) return std::nullopt;
    std::string text = std::move(texts_.front());
    texts_.pop_front();
    waiting_ = !texts_.empty();
    return text;
  }

  std::mutex mutex_;
  std::deque<std::string> texts_;
  std::atomic<bool> waiting_{false};
};

// What a model has been warned of, or is to be at the end of the backward that found it; its buckets share it.
struct Notices {
  bool strides = false;
  bool own_gradients = false;
  std::int64_t graphs = 0;  // gradients that came with a graph of their own
  Warnings unsaid;

  // The backward has failed: the next one that finds the same says it, at its own line.
  void forget_unsaid() {
    if (!unsaid.forget()) return;
    strides = own_gradients = false;
    graphs = 0;
  }
};

}  // namespace ddp_lab
