#include "comm/shared_memory/peers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

namespace ddp_lab::shared_memory {

namespace {

constexpr int kThread = -1;
constexpr int kLock = -2;

struct flock byte_of(int rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

void close_all(const std::vector<int>& descriptors) {
  for (const int descriptor : descriptors) {
    if (descriptor >= 0) {
      close(descriptor);
    }
  }
}

}  // namespace

void Peers::hold(int descriptor, int rank) {
  struct flock lock = byte_of(rank);
  if (fcntl(descriptor, F_OFD_SETLK, &lock) != 0) {
    throw std::system_error(errno, std::generic_category(), "the lock of rank " + std::to_string(rank));
  }
}

Peers::Peers(const std::vector<int>& pids, int descriptor) : descriptor_(descriptor) {
  for (const int pid : pids) {
    int process = pid == 0 ? kLock : kThread;
    if (pid != 0 && pid != getpid()) {
      process = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
      if (process < 0) {
        const int error = errno;
        close_all(processes_);
        throw std::system_error(error, std::generic_category(), "pidfd_open of process " + std::to_string(pid));
      }
    }
    processes_.push_back(process);
  }
}

Peers::~Peers() { close_all(processes_); }

bool Peers::ended(int rank) const {
  const int process = processes_[static_cast<std::size_t>(rank)];
  if (process == kLock) {
    struct flock lock = byte_of(rank);
    return fcntl(descriptor_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
  }
  pollfd asked{process, POLLIN, 0};
  return process >= 0 && poll(&asked, 1, 0) > 0;
}

}  // namespace ddp_lab::shared_memory
