#include "record/black_box.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>

#include "record/recorder.h"

namespace ddp_lab {
namespace {

constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kTextBytes = 4 << 20;  // touched only as far as it is used

struct Header {
  std::array<char, 8> magic{'D', 'D', 'P', 'L', 'B', 'B', 'X', '1'};
  std::uint64_t pid = 0;
  std::uint64_t slots_at = 0;
  std::uint64_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t texts_at = 0;
  std::atomic<std::uint64_t> text_bytes{0};  // those that are completely written
};
static_assert(sizeof(Header) == 56 && std::atomic<std::uint64_t>::is_always_lock_free);

std::mutex mutex;                      // guards the texts; a thread that is not in a forked child may hold it there
std::atomic<Header*> header{nullptr};  // null: nothing is left
char* texts = nullptr;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

char* map(int file, std::size_t offset, std::size_t bytes) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) fail("mmap");
  return static_cast<char*>(mapped);
}

void in_forked_child() {
  header = nullptr;
  recorder().keep_for_itself();
}

}  // namespace

void leave_in(int file) {
  const Recorder::Memory memory = recorder().memory();
  const std::size_t texts_at = kHeaderBytes + memory.bytes;
  if (::ftruncate(file, 0) != 0 || ::ftruncate(file, static_cast<off_t>(texts_at + kTextBytes)) != 0) fail("ftruncate");
  char* const begin = map(file, 0, kHeaderBytes);
  texts = map(file, texts_at, kTextBytes);
  recorder().keep_in(map(file, kHeaderBytes, memory.bytes));
  auto* const made = new (begin) Header;
  made->pid = static_cast<std::uint64_t>(::getpid());
  made->slots_at = kHeaderBytes;
  made->slots = memory.slots;
  made->slot_bytes = memory.slot_bytes;
  made->texts_at = texts_at;
  header = made;
  ::pthread_atfork(nullptr, nullptr, &in_forked_child);
}

void leave(std::string_view text) {
  Header* const begun = header;
  if (begun == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::uint64_t used = begun->text_bytes.load(std::memory_order_relaxed);
  if (text.size() + 1 > kTextBytes - used) return;
  std::memcpy(texts + used, text.data(), text.size());
  texts[used + text.size()] = '\n';
  begun->text_bytes.store(used + text.size() + 1, std::memory_order_release);
}

}  // namespace ddp_lab
