// Pages of this kernel: 4 KiB on x86-64, also 16 or 64 KiB on aarch64, so that a program asks when it runs. Mappings of
// files begin at one, and `madvise` rounds what it is given up to whole ones.
#pragma once

#include <unistd.h>

#include <cstddef>

namespace ddp_lab {

inline std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

inline std::size_t whole_pages(std::size_t bytes) {
  const std::size_t page = page_bytes();
  return (bytes + page - 1) / page * page;
}

}  // namespace ddp_lab
