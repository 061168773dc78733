// Stands in for a kernel with pages of another size, for what asks by `sysconf`.
#pragma once

#include <unistd.h>

namespace kernel_pages {

inline long bytes = 0;  // 0: this kernel's own

// While it exists.
struct Of {
  explicit Of(long size) { bytes = size; }
  ~Of() { bytes = 0; }
};

}  // namespace kernel_pages

extern "C" long __sysconf(int name) noexcept;  // glibc's own name of it

// The thread sanitizer asks before it has begun.
extern "C" __attribute__((no_sanitize("thread", "address", "undefined"))) long sysconf(int name) noexcept {
  return name == _SC_PAGESIZE && kernel_pages::bytes != 0 ? kernel_pages::bytes : __sysconf(name);
}
