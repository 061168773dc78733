// Warnings to the user, at the line of the program that they are about.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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

  // To be called without a lock. Where nothing of Python is there, as in a test of C++, torch warns.
  void say() {
    for (const std::string& text : take()) {
      if (const Warn warn = warn_at_line.load()) {
        warn(text);
      } else {
        TORCH_WARN(text);
      }
    }
  }

 private:
  std::vector<std::string> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_ = false;
    return std::exchange(texts_, {});
  }

  std::mutex mutex_;
  std::vector<std::string> texts_;
  std::atomic<bool> waiting_{false};
};

// Of all models: the parts of a reducer that find something do not know whose they are.
inline Warnings& warnings() {
  static Warnings all;
  return all;
}

}  // namespace ddp_lab
