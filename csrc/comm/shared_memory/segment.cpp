#include "comm/shared_memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace ddp_lab::shared_memory {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Segment Segment::create(std::size_t bytes) {
  const int descriptor = memfd_create("shm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) {
    fail("memfd_create");
  }
  Segment made(descriptor, 0);  // closes it if what follows fails
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    fail("ftruncate");
  }
  // A peer that made it smaller would kill the others with SIGBUS.
  if (fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail("F_ADD_SEALS");
  }
  Segment mapped(std::exchange(made.descriptor_, -1), bytes);
  return mapped;
}

Segment Segment::attach(int pid, int descriptor, std::size_t bytes, Access access) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const int opened = open(path.c_str(), (access == Access::kWrite ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (opened < 0) {
    fail(path);
  }
  Segment made(opened, 0);
  struct stat found{};
  if (fstat(opened, &found) != 0) {
    fail(path);
  }
  if (found.st_size != static_cast<off_t>(bytes)) {
    throw std::runtime_error(path + " is no segment of this group");
  }
  Segment mapped(std::exchange(made.descriptor_, -1), bytes, access);
  return mapped;
}

Segment Segment::create_named(const std::string& name, std::size_t bytes) {
  const int descriptor = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR);
  if (descriptor < 0) {
    fail("shm_open of " + name);
  }
  Segment made(descriptor, 0);  // closes it if what follows fails
  const int error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  if (error != 0) {
    unlink(name);
    throw std::system_error(error, std::generic_category(), "posix_fallocate of " + std::to_string(bytes) + " B");
  }
  Segment mapped(std::exchange(made.descriptor_, -1), bytes);
  return mapped;
}

Segment Segment::attach_named(const std::string& name, std::size_t bytes) {
  const int opened = shm_open(name.c_str(), O_RDWR, 0);
  if (opened < 0) {
    fail("shm_open of " + name);
  }
  Segment made(opened, 0);
  struct stat found{};
  if (fstat(opened, &found) != 0) {
    fail("fstat of " + name);
  }
  const bool ours = S_ISREG(found.st_mode) && found.st_uid == geteuid() && (found.st_mode & (S_IRWXG | S_IRWXO)) == 0;
  if (!ours || found.st_size != static_cast<off_t>(bytes)) {
    throw std::runtime_error(name + " is no segment of this group");
  }
  Segment mapped(std::exchange(made.descriptor_, -1), bytes);
  return mapped;
}

void Segment::unlink(const std::string& name) {
  if (shm_unlink(name.c_str()) != 0 && errno != ENOENT) {
    fail("shm_unlink of " + name);
  }
}

Segment::Segment(int descriptor, std::size_t bytes, Access access) : descriptor_(descriptor), bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  const int allowed = access == Access::kWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* mapped = mmap(nullptr, bytes, allowed, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    throw std::system_error(error, std::generic_category(), "mmap of shared memory");
  }
  data_ = static_cast<std::byte*>(mapped);
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

}  // namespace ddp_lab::shared_memory
