// A warning to the user, at the line of the program that it is about.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <string>

namespace ddp_lab {

// Warns at the innermost line of the program on this thread; may throw what the user has made of warnings.
using Warn = void (*)(const std::string& text);

inline std::atomic<Warn> warn_at_line{nullptr};

// To be called without a lock: Python may run. Where nothing of Python is there, as in a test of C++, torch warns.
inline void warn_user(const std::string& text) {
  if (const Warn warn = warn_at_line.load()) return warn(text);
  TORCH_WARN(text);
}

}  // namespace ddp_lab
