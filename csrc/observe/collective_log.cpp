#include "observe/collective_log.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "comm/collective_interception.h"
#include "record/recorder.h"

namespace ddp_lab {
namespace {

struct Entry {
  Collective collective;
  std::atomic<std::int64_t> end_ns{0};  // written where the collective completes
};
using EntryPointer = std::shared_ptr<Entry>;

struct Log {
  std::mutex mutex;
  std::vector<EntryPointer> entries;
  std::atomic<int> users{0};
};

Log& log() {
  static auto* const kept = new Log;  // other threads may outlive statics
  return *kept;
}

class Logged final : public Watch {
 public:
  explicit Logged(EntryPointer entry) : entry_(std::move(entry)) {}
  void ended(bool) override { entry_->end_ns = now_ns(); }

 private:
  const EntryPointer entry_;
};

std::shared_ptr<Watch> enter(CollectiveCall& call) {
  if (log().users == 0) return nullptr;
  auto entry = std::make_shared<Entry>();
  Collective& made = entry->collective;
  made.name = call.operation;
  made.begin_ns = now_ns();
  made.ranks = call.group.getSize();
  made.bytes.assign(call.argument_bytes.begin(), call.argument_bytes.begin() + call.arguments);
  const std::lock_guard<std::mutex> lock(log().mutex);
  log().entries.push_back(entry);
  return std::make_shared<Logged>(std::move(entry));
}

}  // namespace

void open_collective_log() {
  set_watcher(Role::kLogs, &enter);
  const std::lock_guard<std::mutex> lock(log().mutex);
  if (log().users++ == 0) log().entries.clear();
}

void close_collective_log() {
  const std::lock_guard<std::mutex> lock(log().mutex);
  if (log().users > 0) --log().users;
}

std::vector<Collective> take_collectives() {
  std::vector<EntryPointer> taken;
  {
    const std::lock_guard<std::mutex> lock(log().mutex);
    taken.swap(log().entries);
  }
  std::vector<Collective> found;
  found.reserve(taken.size());
  for (const EntryPointer& entry : taken) {
    found.push_back(entry->collective);
    found.back().end_ns = entry->end_ns;
  }
  return found;
}

}  // namespace ddp_lab
