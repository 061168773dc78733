// Memory that the ranks of a group share: anonymous, so that no other user can guess its name and nothing is left of it
// after a crash. Peers open it through /proc/PID/fd, which also works where /dev/shm is small.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ddp_lab::shared_memory {

class Segment {
 public:
  // Makes one of `bytes` zero bytes; pages cost memory when they are first written.
  static Segment create(std::size_t bytes);

  enum class Access { kRead, kWrite };

  // Maps the one that process `pid` has open as `descriptor`. Throws std::system_error if that is not allowed, and
  // std::runtime_error if it has another size.
  static Segment attach(int pid, int descriptor, std::size_t bytes, Access access = Access::kWrite);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  int descriptor() const { return descriptor_; }

  // Once all peers have attached: the mapping stays.
  void close_descriptor();

 private:
  Segment(int descriptor, std::size_t bytes, Access access = Access::kWrite);

  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace ddp_lab::shared_memory
