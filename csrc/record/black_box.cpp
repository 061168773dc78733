#include "record/black_box.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>

#include "pages.h"
#include "record/recorder.h"

namespace ddp_lab {
namespace {

constexpr std::uint64_t kMagic = 0x3158'4242'4c50'4444;  // "DDPLBBX1"
constexpr std::size_t kTextBytes = 4 << 20;              // touched only as far as it is used

struct Header {
  // Stored last, with release: publishes the fields that never change. 0: nobody uses the file.
  std::atomic<std::uint64_t> magic{0};
  std::uint64_t pid = 0;
  std::uint64_t slots_at = 0;
  std::uint64_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t texts_at = 0;
  // How many are completely written. Stored with release by who holds `mutex`: publishes the bytes before.
  std::atomic<std::uint64_t> text_bytes{0};
};
static_assert(sizeof(Header) == 56 && std::atomic<std::uint64_t>::is_always_lock_free);

std::mutex mutex;  // guards the texts; a thread that is not in a forked child may hold it there
// Null: nothing is left. Stored with release: publishes the header and `texts`; loaded with acquire.
std::atomic<Header*> header{nullptr};
char* texts = nullptr;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

char* map(int file, std::size_t offset, std::size_t bytes) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) fail("mmap");
  return static_cast<char*>(mapped);
}

void in_forked_child() {
  header.store(nullptr, std::memory_order_release);
  recorder().keep_for_itself();
}

}  // namespace

void leave_in(int file) {
  const Recorder::Memory memory = recorder().memory();
  const std::size_t header_bytes = whole_pages(sizeof(Header));
  const std::size_t texts_at = header_bytes + memory.bytes;
  if (::ftruncate(file, 0) != 0 || ::ftruncate(file, static_cast<off_t>(texts_at + kTextBytes)) != 0) fail("ftruncate");
  char* const begin = map(file, 0, header_bytes);
  texts = map(file, texts_at, kTextBytes);
  recorder().keep_in(map(file, header_bytes, memory.bytes));
  auto* const made = new (begin) Header;
  made->pid = static_cast<std::uint64_t>(::getpid());
  made->slots_at = header_bytes;
  made->slots = memory.slots;
  made->slot_bytes = memory.slot_bytes;
  made->texts_at = texts_at;
  made->magic.store(kMagic, std::memory_order_release);
  header.store(made, std::memory_order_release);
  ::pthread_atfork(nullptr, nullptr, &in_forked_child);
}

void leave(std::string_view text) {
  Header* const begun = header.load(std::memory_order_acquire);
  if (begun == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::uint64_t used = begun->text_bytes.load(std::memory_order_relaxed);
  if (text.size() + 1 > kTextBytes - used) return;
  std::memcpy(texts + used, text.data(), text.size());
  texts[used + text.size()] = '\n';
  begun->text_bytes.store(used + text.size() + 1, std::memory_order_release);
}

}  // namespace ddp_lab
