#include "comm/shared_memory/pool.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "pages.h"

namespace ddp_lab::shared_memory {

namespace {

std::size_t memory_of_machine() {
  return whole_pages(static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                     static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
}

}  // namespace

std::shared_ptr<Pool> Pool::own() {
  // Kept forever: tensors in it may be let go by other threads at the end of the process.
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::shared_ptr<Pool>;
  const std::lock_guard<std::mutex> lock(*mutex);
  if (!*kept || (*kept)->pid_ != getpid()) {
    *kept = std::make_shared<Pool>(memory_of_machine());
  }
  return *kept;
}

PoolView Pool::of_process(int pid, int descriptor, std::size_t bytes) {
  if (pid == getpid()) {  // a rank that is a thread of this process
    return own()->view();
  }
  // One mapping for all groups that the process is in. A file is known by its number while it is mapped.
  static auto* const mutex = new std::mutex;
  static auto* const mapped = new std::map<ino_t, std::weak_ptr<const Segment>>;
  Segment opened = Segment::attach(pid, descriptor, bytes, Segment::Access::kRead);
  struct stat found{};
  if (fstat(opened.descriptor(), &found) != 0) {
    throw std::system_error(errno, std::generic_category(), "fstat of a pool");
  }
  opened.close_descriptor();
  const std::lock_guard<std::mutex> lock(*mutex);
  std::erase_if(*mapped, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const Segment>& known = (*mapped)[found.st_ino];
  std::shared_ptr<const Segment> segment = known.lock();
  if (!segment) {
    segment = std::make_shared<const Segment>(std::move(opened));
    known = segment;
  }
  return {segment, segment->data()};
}

Pool::Pool(std::size_t bytes) : bytes_(bytes), pid_(getpid()), segment_(Segment::create(bytes)), free_{{0, bytes}} {}

PoolView Pool::view() { return {shared_from_this(), segment_.data()}; }

at::Tensor Pool::allocate(std::int64_t numel, const at::TensorOptions& options) {
  const std::size_t bytes = whole_pages(static_cast<std::size_t>(numel) * options.dtype().itemsize());
  if (bytes == 0) {
    return {};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& range) { return range.second >= bytes; });
  if (found == free_.end()) {
    return {};
  }
  const auto [first, left] = *found;
  free_.erase(found);
  if (left > bytes) {
    free_[first + bytes] = left - bytes;
  }
  return at::from_blob(
      segment_.data() + first, {numel},
      [pool = shared_from_this(), first, bytes](void*) { pool->release(first, bytes); }, options);
}

void Pool::release(std::size_t first, std::size_t bytes) {
  if (getpid() != pid_) {
    return;  // a fork lets go of what its parent still uses
  }
  madvise(segment_.data() + first, bytes, MADV_REMOVE);  // without it the pages would wait for their next use
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = free_.lower_bound(first);
  if (next != free_.end() && next->first == first + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == first) {
      before->second += bytes;
      return;
    }
  }
  free_[first] = bytes;
}

std::optional<std::size_t> Pool::offset_of(const void* data, std::size_t bytes) const {
  const auto* const first = static_cast<const std::byte*>(data);
  if (first < segment_.data() || first + bytes > segment_.data() + bytes_) {
    return std::nullopt;
  }
  return static_cast<std::size_t>(first - segment_.data());
}

}  // namespace ddp_lab::shared_memory
