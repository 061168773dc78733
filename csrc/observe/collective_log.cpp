#include "observe/collective_log.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "record/recorder.h"

namespace ddp_lab {
namespace {

constexpr char kLibrary[] = "c10d::";

struct Entry {
  Collective collective;
  std::atomic<std::int64_t> end_ns{0};  // written where the collective completes
};
using EntryPointer = std::shared_ptr<Entry>;

struct Log {
  std::mutex mutex;
  std::vector<EntryPointer> entries;
  int users = 0;
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
};

Log& log() {
  static auto* const kept = new Log;  // other threads may outlive statics
  return *kept;
}

template <typename Class>
bool holds(const c10::IValue& value) {
  return value.isCustomClass() && *value.type() == *c10::getCustomClassType<c10::intrusive_ptr<Class>>();
}

// Of a tensor or of (lists of) lists of tensors; -1 of anything else.
std::int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? static_cast<std::int64_t>(value.toTensor().nbytes()) : 0;
  if (!value.isList()) return -1;
  std::int64_t sum = -1;
  for (const c10::IValue& element : value.toListRef()) {
    const std::int64_t bytes = bytes_of(element);
    if (bytes >= 0) sum = (sum < 0 ? 0 : sum) + bytes;
  }
  return sum;
}

struct Entered : at::ObserverContext {
  explicit Entered(EntryPointer made) : entry(std::move(made)) {}
  const EntryPointer entry;
};

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  if (std::strncmp(function.name(), kLibrary, sizeof kLibrary - 1) != 0) return nullptr;
  auto entry = std::make_shared<Entry>();
  Collective& made = entry->collective;
  made.name = function.name() + (sizeof kLibrary - 1);
  made.begin_ns = now_ns();
  for (const c10::IValue& input : function.inputs()) {
    if (holds<c10d::ProcessGroup>(input)) made.ranks = input.toCustomClass<c10d::ProcessGroup>()->getSize();
    const std::int64_t bytes = bytes_of(input);
    if (bytes >= 0) made.bytes.push_back(bytes);
  }
  {
    const std::lock_guard<std::mutex> lock(log().mutex);
    log().entries.push_back(entry);
  }
  return std::make_unique<Entered>(std::move(entry));
}

void leave(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr || function.outputs().empty()) return;
  const c10::IValue& last = function.outputs().back();
  if (!holds<c10d::Work>(last)) return;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = last.toCustomClass<c10d::Work>()->getFuture();
  } catch (const c10::Error&) {
    return;  // sends and receives of some backends have none
  }
  if (!future) return;
  future->addCallback(
      [entry = static_cast<Entered*>(context)->entry](c10::ivalue::Future&) { entry->end_ns = now_ns(); },
      /*uses_future=*/false);
}

}  // namespace

void open_collective_log() {
  const std::lock_guard<std::mutex> lock(log().mutex);
  if (log().users++ > 0) return;
  log().entries.clear();
  log().callback = at::addGlobalCallback(at::RecordFunctionCallback(&enter, &leave)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

void close_collective_log() {
  const std::lock_guard<std::mutex> lock(log().mutex);
  if (log().users == 0 || --log().users > 0) return;
  at::removeCallback(log().callback);
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
