#include "record/recorder.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "pages.h"

namespace ddp_lab {

namespace {

// An event without its sequence number, which the slot's stamp implies, in words that are stored one by one.
constexpr std::size_t kWords = (sizeof(Event) - sizeof(Event::sequence)) / sizeof(std::uint64_t);
using Words = std::array<std::uint64_t, kWords>;
static_assert(offsetof(Event, sequence) == 0 && std::endian::native == std::endian::little);

template <typename Low, typename High>
constexpr std::uint64_t join(Low low, High high) noexcept {
  static_assert(sizeof(Low) == 4 && sizeof(High) == 4);
  return static_cast<std::uint32_t>(low) | std::uint64_t{static_cast<std::uint32_t>(high)} << 32;
}

// What copying the bytes would give. Field by field: 8 bytes just stored as two times 4 can't be forwarded
// from the processor's store buffer, and copying costs 5 ns more.
Words pack(const Event& event, std::int64_t host_ns, std::uint32_t thread) noexcept {
  const std::uint32_t kind = static_cast<std::uint32_t>(event.kind) | std::uint32_t{event.generation} << 16;
  return {static_cast<std::uint64_t>(host_ns),
          static_cast<std::uint64_t>(event.device_begin_ns),
          static_cast<std::uint64_t>(event.device_end_ns),
          static_cast<std::uint64_t>(event.bytes),
          static_cast<std::uint64_t>(event.step),
          join(event.reducer, event.process_group),
          join(event.bucket, event.parameter),
          join(kind, thread)};
}

// [Note: stamps] A slot's stamp says which event it holds and whether that event is completely written; 0
// means none yet, and a later event has a higher stamp. A writer takes the slot (being_written), then fills
// it and publishes (written). A word is stored with release and loaded with acquire: a reader that sees a
// word of a newer event also sees the newer stamp when it looks again, and discards what it read.
//
// A writer that stalls in a slot while the others go round the whole ring keeps it: the writer that comes
// round gives its own event up and leaves its stamp in `lost`. One missing event is better than two mixed
// ones. A writer that stalls before it takes the slot finds a newer event there and gives up too: its own
// would be overwritten by now.
constexpr std::uint64_t being_written(std::uint64_t sequence) { return 2 * sequence + 1; }
constexpr std::uint64_t written(std::uint64_t sequence) { return 2 * sequence + 2; }
constexpr bool is_taken(std::uint64_t stamp) { return stamp % 2 == 1; }

std::size_t power_of_two(std::size_t at_least) {
  std::size_t size = 1;
  while (size < at_least) size *= 2;
  return size;
}

std::uint32_t thread_index() noexcept {
  static std::atomic<std::uint32_t> threads{0};  // relaxed: gives numbers out
  thread_local const std::uint32_t index = threads.fetch_add(1, std::memory_order_relaxed);
  return index;
}

void raise_to(std::atomic<std::uint64_t>& value, std::uint64_t at_least) noexcept {
  std::uint64_t current = value.load(std::memory_order_relaxed);
  while (current < at_least && !value.compare_exchange_weak(current, at_least, std::memory_order_release)) {
  }
}

// Zeros in pages of their own, or null.
void* own_pages(std::size_t bytes) noexcept {
  void* const made = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return made == MAP_FAILED ? nullptr : made;
}

}  // namespace

// Zeros are an empty slot. Another process may read it: atomics must be instructions, and not locks.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct Recorder::Slot {
  // Taken by an exchange, which acquires what the writer before left. Its store with release publishes `words`; readers
  // load it with acquire, and once more after the words.
  std::atomic<std::uint64_t> stamp;
  // Stamp of the last event that found the slot taken. Released and acquired: what the reader loads after it is not
  // older.
  std::atomic<std::uint64_t> lost;
  // Released and acquired one by one: publish that the slot was taken; see [Note: stamps].
  std::array<std::atomic<std::uint64_t>, kWords> words;
};

Recorder::Recorder(std::size_t capacity)
    : mask_(power_of_two(capacity) - 1), slots_(static_cast<Slot*>(own_pages(memory().bytes))) {
  if (slots_ == nullptr) throw std::bad_alloc();
}

Recorder::~Recorder() { ::munmap(slots_, memory().bytes); }

Recorder::Memory Recorder::memory() const noexcept {
  return {mask_ + 1, sizeof(Slot), whole_pages((mask_ + 1) * sizeof(Slot))};
}

std::size_t Recorder::written_bytes() const noexcept {
  return std::min<std::uint64_t>(head_.load(std::memory_order_relaxed), mask_ + 1) * sizeof(Slot);
}

void Recorder::keep_in(void* mapping) {
  const std::size_t bytes = memory().bytes;
  std::memcpy(mapping, static_cast<const void*>(slots_), written_bytes());
  if (::mremap(mapping, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, slots_) == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mremap");
  }
}

void Recorder::keep_for_itself() noexcept {
  void* const copy = own_pages(memory().bytes);
  if (copy == nullptr) return enable(false);
  std::memcpy(copy, static_cast<const void*>(slots_), written_bytes());
  ::mremap(copy, memory().bytes, memory().bytes, MREMAP_MAYMOVE | MREMAP_FIXED, slots_);
}

void Recorder::write(const Event& event) noexcept {
  const std::int64_t host_ns = event.host_ns != 0 ? event.host_ns : now_ns();
  const std::uint64_t sequence = head_.fetch_add(1, std::memory_order_relaxed);
  if (Slot* const slot = take(sequence)) fill(*slot, sequence, event, host_ns);
}

Recorder::Slot* Recorder::take(std::uint64_t sequence) noexcept {
  Slot& slot = slots_[sequence & mask_];
  std::uint64_t stamp = slot.stamp.load(std::memory_order_relaxed);
  // A failed exchange means that a writer one lap apart is here at this very moment.
  if (!is_taken(stamp) && stamp < written(sequence) &&
      slot.stamp.compare_exchange_strong(stamp, being_written(sequence), std::memory_order_acq_rel)) {
    return &slot;
  }
  raise_to(slot.lost, written(sequence));
  return nullptr;
}

void Recorder::fill(Slot& slot, std::uint64_t sequence, const Event& event, std::int64_t host_ns) noexcept {
  const Words words = pack(event, host_ns, thread_index());
  for (std::size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.stamp.store(written(sequence), std::memory_order_release);
}

Recorder::Found Recorder::read(std::uint64_t sequence, Event& event) const noexcept {
  const Slot& slot = slots_[sequence & mask_];
  const std::uint64_t wanted = written(sequence);
  // `lost` first: once its number is there, this event will not come any more.
  const bool lost = slot.lost.load(std::memory_order_acquire) >= wanted;
  const std::uint64_t stamp = slot.stamp.load(std::memory_order_acquire);
  if (stamp != wanted) return lost || stamp > wanted ? Found::kGone : Found::kNotYet;
  std::array<std::uint64_t, 1 + kWords> words{sequence};
  for (std::size_t i = 0; i < kWords; ++i) words[1 + i] = slot.words[i].load(std::memory_order_acquire);
  if (slot.stamp.load(std::memory_order_relaxed) != wanted) return Found::kGone;
  event = std::bit_cast<Event>(words);
  return Found::kDone;
}

std::uint64_t Recorder::oldest() const noexcept {
  const std::uint64_t head = head_.load(std::memory_order_relaxed);
  return head - std::min<std::uint64_t>(head, mask_ + 1);
}

Recorder::Batch Recorder::drain(std::uint64_t cursor) {
  const std::lock_guard lock(readers_);
  const std::uint64_t head = head_.load(std::memory_order_relaxed);
  if (cursor > head) {
    throw std::out_of_range("cursor " + std::to_string(cursor) + " is beyond the next event, " + std::to_string(head) +
                            ": it belongs to another recorder");
  }
  Batch batch;
  batch.next = std::max(cursor, oldest());
  batch.events.reserve(head - std::min(head, batch.next));
  Event event;
  while (batch.next < head) {
    const Found found = read(batch.next, event);
    if (found == Found::kNotYet || (found == Found::kGone && !batch.events.empty())) break;
    if (found == Found::kDone) batch.events.push_back(event);
    ++batch.next;
  }
  batch.dropped = batch.next - cursor - batch.events.size();
  // Only what no reader had seen counts for the statistics.
  const std::uint64_t first = cursor + batch.dropped;
  if (first > drained_) dropped_ += first - std::max(cursor, drained_);
  drained_ = std::max(drained_, batch.next);
  return batch;
}

Recorder::Statistics Recorder::statistics() const {
  const std::lock_guard lock(readers_);
  const std::uint64_t oldest = this->oldest();
  const std::uint64_t waiting_lost = oldest - std::min(oldest, drained_);
  return {head_.load(std::memory_order_relaxed), dropped_ + waiting_lost, mask_ + 1, enabled()};
}

Recorder& recorder() {
  static Recorder* const instance = new Recorder();
  return *instance;
}

std::int64_t now_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

double measure_ns_per_event(bool enabled, int rounds) {
  constexpr int kEvents = 20'000;
  Recorder recorder;
  recorder.enable(enabled);
  std::vector<double> costs;
  for (int round = 0; round < rounds; ++round) {
    Event event;
    event.kind = Kind::kGradReady;
    const std::int64_t begin = now_ns();
    for (event.parameter = 0; event.parameter < kEvents; ++event.parameter) recorder.record(event);
    costs.push_back(static_cast<double>(now_ns() - begin) / kEvents);
  }
  std::nth_element(costs.begin(), costs.begin() + rounds / 2, costs.end());
  return costs[rounds / 2];
}

}  // namespace ddp_lab
