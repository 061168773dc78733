#include "comm/abortable_work.h"

#include <cxxabi.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <typeinfo>
#include <utility>
#include <vector>

#include "comm/collective_interception.h"

namespace ddp_lab {
namespace {

using c10d::Work;
using Made = c10::intrusive_ptr<Work>;
using Future = c10::ivalue::Future;

struct Opened : Work {
  static constexpr auto kFinish = &Opened::finish;
};

// What is known of a work until Gloo has completed it; who waits may hold nothing of it but its future.
class OpenWork {
 public:
  OpenWork(Made made, const c10d::ProcessGroup& group, int peer) : made_(std::move(made)), group_(&group) {
    if (c10d::isP2POp(made_->retrieveOpType())) {  // these have no future
      message_ = {made_->retrieveOpType() == c10d::OpType::SEND, peer, group.getGroupName()};
      return;
    }
    const auto gloos = made_->getFuture();
    future_ = c10::make_intrusive<Future>(gloos->elementType(), gloos->devices());
  }

  // Hands Gloo's word on to the future, whenever it comes.
  static void follow(const std::shared_ptr<OpenWork>& one) {
    if (!one->is_collective()) return;
    one->made_->getFuture()->addCallback([one](Future& gloos) {
      if (one->told_.exchange(true)) return;
      if (gloos.hasError()) {
        one->future_->setError(gloos.exception_ptr());
      } else {
        one->future_->markCompleted(gloos.value(), gloos.storages());
      }
    });
  }

  // Whether it has aborted a collective. A send or a receive is aborted, too, but leaves no thread of Gloo's behind.
  bool abort(const std::exception_ptr& error) {
    if (over()) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (error_) return false;
      error_ = error;
    }
    if (is_collective()) {
      (*made_.*Opened::kFinish)(error);
      if (!told_.exchange(true)) future_->setError(error);
    } else {
      made_->abort();
    }
    return is_collective();
  }

  bool is_collective() const { return static_cast<bool>(future_); }
  bool over() const { return made_->isCompleted(); }
  bool is_of(const c10d::ProcessGroup& group) const { return group_ == &group; }

  // What it was aborted with; null if it was not.
  std::exception_ptr error() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  Work& made() const { return *made_; }
  const c10::intrusive_ptr<Future>& future() const { return future_; }
  const Message& message() const { return message_; }  // of a send or receive

  // Which thread waits for it, by its number in Python: of a send or receive, 0 if none does. Publishes nothing: the
  // message never changes.
  std::atomic<unsigned long> awaited_by{0};

 private:
  const Made made_;
  const c10d::ProcessGroup* const group_;  // to tell it from others; it may be gone
  c10::intrusive_ptr<Future> future_;
  Message message_;
  std::atomic<bool> told_{false};  // the future has its word: the first exchange gives it; publishes nothing
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

// While it exists, this thread waits for a send or receive.
class Awaiting {
 public:
  explicit Awaiting(OpenWork& open_work) : awaited_by_(open_work.is_collective() ? nullptr : &open_work.awaited_by) {
    if (awaited_by_ != nullptr) *awaited_by_ = static_cast<unsigned long>(pthread_self());
  }
  ~Awaiting() {
    if (awaited_by_ != nullptr) *awaited_by_ = 0;
  }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

 private:
  std::atomic<unsigned long>* const awaited_by_;
};

class AbortableWork final : public Work, public ReportsWaits {
 public:
  explicit AbortableWork(std::shared_ptr<OpenWork> open_work)
      : Work(-1, open_work->made().retrieveOpType()), open_work_(std::move(open_work)) {}

  bool has_future() const override { return open_work_->is_collective(); }
  bool isCompleted() override { return made().isCompleted(); }
  bool isSuccess() const override { return made().isSuccess(); }
  std::exception_ptr exception() const override { return made().exception(); }
  int sourceRank() const override { return made().sourceRank(); }
  std::vector<at::Tensor> result() override { return made().result(); }
  void synchronize() override { made().synchronize(); }
  void blockCurrentStream() override { made().blockCurrentStream(); }
  void abort() override { made().abort(); }
  c10::intrusive_ptr<Future> getFutureResult() override { return made().getFutureResult(); }
  float getDuration() const override { return made().getDuration(); }
  std::uint64_t getSequencenumber() const override { return made().getSequencenumber(); }

  bool wait(std::chrono::milliseconds timeout) override {
    const Waiting waiting(*this, isCompleted());
    const Awaiting awaiting(*open_work_);
    if (made().wait(timeout)) {
      if (!has_future()) notify_end();
      return true;
    }
    if (const auto error = open_work_->error())
      std::rethrow_exception(error);  // a send's or receive's own wait says only no
    return false;
  }

  c10::intrusive_ptr<Future> getFuture() override {
    return open_work_->future() ? open_work_->future() : made().getFuture();
  }

 private:
  Work& made() const { return open_work_->made(); }

  const std::shared_ptr<OpenWork> open_work_;
};

// One without a future, which nobody can abort: it tells when it is waited for.
class WaitedWork final : public Work, public ReportsWaits {
 public:
  explicit WaitedWork(Made made) : Work(-1, made->retrieveOpType()), made_(std::move(made)) {}

  bool has_future() const override { return false; }
  bool isCompleted() override { return made_->isCompleted(); }
  bool isSuccess() const override { return made_->isSuccess(); }
  std::exception_ptr exception() const override { return made_->exception(); }
  int sourceRank() const override { return made_->sourceRank(); }
  std::vector<at::Tensor> result() override { return made_->result(); }
  void synchronize() override { made_->synchronize(); }
  void abort() override { made_->abort(); }
  c10::intrusive_ptr<Future> getFuture() override { return made_->getFuture(); }
  std::uint64_t getSequencenumber() const override { return made_->getSequencenumber(); }

  bool wait(std::chrono::milliseconds timeout) override {
    const Waiting waiting(*this, /*over=*/false);
    const bool done = made_->wait(timeout);
    if (done) notify_end();
    return done;
  }

 private:
  const Made made_;
};

// ---- which there are

std::mutex open_works_mutex;

std::vector<std::weak_ptr<OpenWork>>& open_works() {
  static auto* const kept = new std::vector<std::weak_ptr<OpenWork>>;  // other threads may outlive statics
  return *kept;
}

void keep(const std::shared_ptr<OpenWork>& one) {
  constexpr std::size_t kFew = 32;
  static std::size_t limit = kFew;
  const std::lock_guard<std::mutex> lock(open_works_mutex);
  auto& all = open_works();
  if (all.size() >= limit) {
    const auto is_over = [](const std::weak_ptr<OpenWork>& weak) {
      const auto alive = weak.lock();
      return !alive || alive->over();
    };
    all.erase(std::remove_if(all.begin(), all.end(), is_over), all.end());
    limit = std::max(kFew, 2 * all.size());
  }
  all.push_back(one);
}

std::vector<std::shared_ptr<OpenWork>> open_works_of(const c10d::ProcessGroup& group) {
  std::vector<std::shared_ptr<OpenWork>> found;
  const std::lock_guard<std::mutex> lock(open_works_mutex);
  for (const auto& weak : open_works()) {
    if (auto one = weak.lock(); one && one->is_of(group) && !one->over()) found.push_back(std::move(one));
  }
  return found;
}

// ---- which works are replaced

// Gloo's headers are not among torch's, so the class can't be named; those of collectives derive from it.
bool is_gloos(const Work& work) {
  for (const std::type_info* type = &typeid(work); type != nullptr;) {
    if (std::strstr(type->name(), "ProcessGroupGloo") != nullptr) return true;
    const auto* const derived = dynamic_cast<const abi::__si_class_type_info*>(type);
    type = derived == nullptr ? nullptr : derived->__base_type;
  }
  return false;
}

// Gloo's reduce_scatter makes such a work: it does the rest in `wait`, and has no future.
bool is_of_wait(const Work& work) { return std::strstr(typeid(work).name(), "LambdaWork") != nullptr; }

enum class WorkKind : std::uint8_t { kOther, kGloos, kOfWait };

// Names are compared once for each class, as far as one thread makes works of one class in a row.
WorkKind kind_of(const Work& work) {
  thread_local const std::type_info* known = nullptr;
  thread_local WorkKind kind = WorkKind::kOther;
  if (known != &typeid(work)) {
    kind = is_of_wait(work) ? WorkKind::kOfWait : is_gloos(work) ? WorkKind::kGloos : WorkKind::kOther;
    known = &typeid(work);
  }
  return kind;
}

// What the caller of a collective gets in the place of the work that its backend made.
Made abortable(Made made, const c10d::ProcessGroup& group, int peer) {
  switch (kind_of(*made)) {
    case WorkKind::kOther:
      return made;
    case WorkKind::kOfWait:
      return c10::make_intrusive<WaitedWork>(std::move(made));
    case WorkKind::kGloos:
      break;
  }
  auto open_work = std::make_shared<OpenWork>(std::move(made), group, peer);
  OpenWork::follow(open_work);
  keep(open_work);
  return c10::make_intrusive<AbortableWork>(std::move(open_work));
}

}  // namespace

void make_gloo_abortable() { replace_works(&abortable); }

std::size_t count_gloo_works(const c10d::ProcessGroup& group) {
  const auto all = open_works_of(group);
  return static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [](const auto& one) { return one->is_collective(); }));
}

std::size_t abort_gloo_works(const c10d::ProcessGroup& group, const std::string& why) {
  const auto error = std::make_exception_ptr(std::runtime_error(why));
  const auto all = open_works_of(group);
  return static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [&](const auto& one) { return one->abort(error); }));
}

std::optional<Message> awaited_message(unsigned long thread) {
  const std::lock_guard<std::mutex> lock(open_works_mutex);
  for (const auto& weak : open_works()) {
    if (const auto one = weak.lock(); one && one->awaited_by.load() == thread) return one->message();
  }
  return std::nullopt;
}

}  // namespace ddp_lab
