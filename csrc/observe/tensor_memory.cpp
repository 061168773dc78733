#include "observe/tensor_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace ddp_lab {
namespace {

struct Allocation {
  std::int64_t bytes;
  c10::DeleterFnPtr free;
};

class CountingAllocator final : public c10::Allocator {
 public:
  // The one of this process; it is never destroyed, because tensors may outlive everything else.
  static CountingAllocator& instance() {
    static auto* const made = new CountingAllocator(c10::GetCPUAllocator());
    return *made;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr made = torchs_->allocate(bytes);
    void* const begin = made.get();
    // The context is what the deleter is called with: only where that is the memory itself can ours find it.
    if (!counts_.load(std::memory_order_relaxed) || begin == nullptr || made.get_context() != begin) return made;
    add(begin, {static_cast<std::int64_t>(bytes), made.get_deleter()});
    const c10::Device device = made.device();
    return {begin, made.release_context(), &CountingAllocator::release, device};
  }

  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { torchs_->copy_data(to, from, bytes); }

  void count(bool on) { counts_ = on; }

  [[nodiscard]] TensorMemory use() {
    const std::lock_guard lock(mutex_);
    return use_;
  }

  void restart_peak() {
    const std::lock_guard lock(mutex_);
    use_.peak = use_.bytes;
  }

 private:
  explicit CountingAllocator(c10::Allocator* torchs) : torchs_(torchs) {}

  static void release(void* begin) {
    CountingAllocator& self = instance();
    const c10::DeleterFnPtr free = self.remove(begin);
    (free != nullptr ? free : self.torchs_->raw_deleter())(begin);
  }

  void add(const void* begin, Allocation made) {
    const std::lock_guard lock(mutex_);
    use_.bytes += made.bytes;
    use_.peak = std::max(use_.peak, use_.bytes);
    allocations_.emplace(begin, made);
  }

  // Before the memory is freed: another thread may get the same address at once.
  c10::DeleterFnPtr remove(const void* begin) {
    const std::lock_guard lock(mutex_);
    const auto found = allocations_.find(begin);
    if (found == allocations_.end()) return nullptr;
    const Allocation made = found->second;
    use_.bytes -= made.bytes;
    allocations_.erase(found);
    return made.free;
  }

  c10::Allocator* const torchs_;
  std::atomic<bool> counts_{false};
  std::mutex mutex_;
  TensorMemory use_;
  std::unordered_map<const void*, Allocation> allocations_;
};

}  // namespace

void see_tensor_memory() { c10::SetCPUAllocator(&CountingAllocator::instance()); }

void count_tensor_memory(bool on) {
  CountingAllocator& counting = CountingAllocator::instance();
  TORCH_CHECK(!on || c10::GetCPUAllocator() == &counting,
              "another library has replaced torch's CPU allocator: measure in a process that does not load it");
  counting.count(on);
}

TensorMemory tensor_memory() { return CountingAllocator::instance().use(); }
void restart_tensor_memory_peak() { CountingAllocator::instance().restart_peak(); }

}  // namespace ddp_lab
