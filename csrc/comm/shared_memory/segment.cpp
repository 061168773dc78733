#include "comm/shared_memory/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace ddp_lab::shared_memory {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

int checked(int descriptor, const std::string& what) {
  if (descriptor < 0) {
    fail(what);
  }
  return descriptor;
}

struct stat status_of(int descriptor, const std::string& what) {
  struct stat found{};
  checked(fstat(descriptor, &found), what);
  return found;
}

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

Segment Segment::create(std::size_t bytes) {
  Segment made(checked(memfd_create("shm", MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create"));
  checked(ftruncate(made.descriptor_, static_cast<off_t>(bytes)), "ftruncate");
  // A peer that made it smaller would kill the others with SIGBUS.
  checked(fcntl(made.descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), "F_ADD_SEALS");
  made.map(bytes);
  return made;
}

Segment Segment::attach(int pid, int descriptor, std::size_t bytes, Access access) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  Segment made(checked(open(path.c_str(), (access == Access::kWrite ? O_RDWR : O_RDONLY) | O_CLOEXEC), path));
  if (status_of(made.descriptor_, path).st_size != static_cast<off_t>(bytes)) {
    throw std::runtime_error(path + " is not a segment of this group");
  }
  made.map(bytes, access);
  return made;
}

Segment Segment::create_named(const std::string& name, std::size_t bytes) {
  const int flags = O_RDWR | O_CREAT | O_EXCL;
  Segment made(checked(shm_open(name.c_str(), flags, S_IRUSR | S_IWUSR), "shm_open of " + name));
  const int error = posix_fallocate(made.descriptor_, 0, static_cast<off_t>(bytes));
  if (error != 0) {
    unlink(name);
    throw std::system_error(error, std::generic_category(), "posix_fallocate of " + std::to_string(bytes) + " B");
  }
  made.map(bytes);
  return made;
}

Segment Segment::attach_named(const std::string& name, std::size_t bytes) {
  Segment made(checked(shm_open(name.c_str(), O_RDWR, 0), "shm_open of " + name));
  const struct stat found = status_of(made.descriptor_, "fstat of " + name);
  const bool ours = S_ISREG(found.st_mode) && found.st_uid == geteuid() && (found.st_mode & (S_IRWXG | S_IRWXO)) == 0;
  if (!ours || found.st_size != static_cast<off_t>(bytes)) {
    throw std::runtime_error(name + " is not a segment of this group");
  }
  made.map(bytes);
  return made;
}

void Segment::unlink(const std::string& name) {
  if (shm_unlink(name.c_str()) != 0 && errno != ENOENT) {
    fail("shm_unlink of " + name);
  }
}

void Segment::map(std::size_t bytes, Access access) {
  const int allowed = access == Access::kWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const mapped = mmap(nullptr, bytes, allowed, MAP_SHARED, descriptor_, 0);
  if (mapped == MAP_FAILED) {
    fail("mmap of shared memory");
  }
  data_ = static_cast<std::byte*>(mapped);
  bytes_ = bytes;
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
  close_descriptor();
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) {
    close(std::exchange(descriptor_, -1));
  }
}

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
