#include "comm/endable_work.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <cxxabi.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

namespace ddp_lab {
namespace {

using c10d::Work;
using Made = c10::intrusive_ptr<Work>;
using Future = c10::ivalue::Future;

struct Opened : Work {
  static constexpr auto kFinish = &Opened::finish;
};

// What is known of a work until Gloo has completed it; who waits may hold nothing of it but its future.
class Ending {
 public:
  Ending(Made made, const c10d::ProcessGroup& group) : made_(std::move(made)), group_(&group) {
    if (c10d::isP2POp(made_->retrieveOpType())) return;  // these have no future
    const auto gloos = made_->getFuture();
    future_ = c10::make_intrusive<Future>(gloos->elementType(), gloos->devices());
  }

  // Hands Gloo's word on to the future, whenever it comes.
  static void follow(const std::shared_ptr<Ending>& one) {
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

  // Whether it has ended a collective. A send or a receive is ended, too, but leaves no thread of Gloo's behind.
  bool end(const std::exception_ptr& error) {
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

  // What it was ended with; null if it was not.
  std::exception_ptr error() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  Work& made() const { return *made_; }
  const c10::intrusive_ptr<Future>& future() const { return future_; }

 private:
  const Made made_;
  const c10d::ProcessGroup* const group_;  // to tell it from others; it may be gone
  c10::intrusive_ptr<Future> future_;
  std::atomic<bool> told_{false};  // the future has its word
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

class EndableWork final : public Work {
 public:
  explicit EndableWork(std::shared_ptr<Ending> ending)
      : Work(-1, ending->made().retrieveOpType()), ending_(std::move(ending)) {}

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
    if (made().wait(timeout)) return true;
    if (const auto error = ending_->error())
      std::rethrow_exception(error);  // a send's or receive's own wait says only no
    return false;
  }

  c10::intrusive_ptr<Future> getFuture() override { return ending_->future() ? ending_->future() : made().getFuture(); }

 private:
  Work& made() const { return ending_->made(); }

  const std::shared_ptr<Ending> ending_;
};

// ---- which there are

std::atomic<bool> installed{false};
std::mutex endings_mutex;

std::vector<std::weak_ptr<Ending>>& endings() {
  static auto* const kept = new std::vector<std::weak_ptr<Ending>>;  // other threads may outlive statics
  return *kept;
}

void keep(const std::shared_ptr<Ending>& one) {
  constexpr std::size_t kFew = 32;
  static std::size_t limit = kFew;
  const std::lock_guard<std::mutex> lock(endings_mutex);
  auto& all = endings();
  if (all.size() >= limit) {
    const auto is_over = [](const std::weak_ptr<Ending>& weak) {
      const auto alive = weak.lock();
      return !alive || alive->over();
    };
    all.erase(std::remove_if(all.begin(), all.end(), is_over), all.end());
    limit = std::max(kFew, 2 * all.size());
  }
  all.push_back(one);
}

std::vector<std::shared_ptr<Ending>> open_ones(const c10d::ProcessGroup& group) {
  std::vector<std::shared_ptr<Ending>> found;
  const std::lock_guard<std::mutex> lock(endings_mutex);
  for (const auto& weak : endings()) {
    if (auto one = weak.lock(); one && one->is_of(group) && !one->over()) found.push_back(std::move(one));
  }
  return found;
}

// ---- on their way through the dispatcher

// Gloo's headers are not among torch's, so the class can't be named; those of collectives derive from it.
bool is_gloos(const Work& work) {
  for (const std::type_info* type = &typeid(work); type != nullptr;) {
    if (std::strstr(type->name(), "ProcessGroupGloo") != nullptr) return true;
    const auto* const derived = dynamic_cast<const abi::__si_class_type_info*>(type);
    type = derived == nullptr ? nullptr : derived->__base_type;
  }
  return false;
}

bool returns_work(const c10::OperatorHandle& operation) {
  const auto& returned = operation.schema().returns();
  return !returned.empty() && returned.back().type()->annotation_str().find("c10d.Work") != std::string::npos &&
         operation.schema().argumentIndexWithName("process_group").has_value();
}

// What the caller of a collective gets in the place of the work that its backend made.
Made endable(Made made, const c10d::ProcessGroup& group) {
  if (!installed || !made || !is_gloos(*made)) return made;
  auto ending = std::make_shared<Ending>(std::move(made), group);
  Ending::follow(ending);
  keep(ending);
  return c10::make_intrusive<EndableWork>(std::move(ending));
}

c10::DispatchKeySet behind(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
}

void pass(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto index = static_cast<std::size_t>(schema.argumentIndexWithName("process_group").value());
  const auto group = torch::jit::peek(*stack, index, schema.arguments().size()).toCustomClass<c10d::ProcessGroup>();
  operation.redispatchBoxed(behind(keys), stack);
  auto& last = stack->back();
  last = c10::IValue(endable(last.toCustomClass<Work>(), *group));
}

std::atomic<WhenComplete (*)(const at::Tensor&)> see_all_reduce_of{nullptr};

using AllReduced = std::tuple<std::vector<at::Tensor>, Made>;
using GroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;

AllReduced pass_all_reduce(c10::DispatchKeySet keys, at::TensorList tensors, const GroupPointer& group,
                           const c10::intrusive_ptr<c10d::ReduceOp>& reduction,
                           const std::optional<at::Tensor>& sparse_indices, bool asynchronous, std::int64_t timeout) {
  static const auto operation =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("c10d::allreduce_", "")
          .typed<AllReduced(at::TensorList, const GroupPointer&, const c10::intrusive_ptr<c10d::ReduceOp>&,
                            const std::optional<at::Tensor>&, bool, std::int64_t)>();
  WhenComplete when;
  const auto see = see_all_reduce_of.load();
  if (see && tensors.size() == 1) when = see(tensors.front());
  AllReduced made =
      operation.redispatch(behind(keys), tensors, group, reduction, sparse_indices, asynchronous, timeout);
  Made& work = std::get<1>(made);
  work = endable(std::move(work), *group);
  if (when.call) std::move(when).add_to(*work->getFuture());
  return made;
}

void pass_all_reduces() {
  static auto* const kernels = [] {
    auto* const made = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__,
                                          static_cast<std::uint32_t>(__LINE__));
    made->impl("allreduce_", TORCH_FN(pass_all_reduce));
    return made;
  }();
  static_cast<void>(kernels);
}

}  // namespace

void see_all_reduces(WhenComplete (*see)(const at::Tensor& summed)) {
  see_all_reduce_of = see;
  pass_all_reduces();
}

void make_gloo_endable() {
  static auto* const kernels = [] {
    pass_all_reduces();
    auto* const made = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__,
                                          static_cast<std::uint32_t>(__LINE__));
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("c10d::", 0) != 0 || name.name == "c10d::allreduce_") continue;
      const auto operation = dispatcher.findSchema(name);
      if (operation && returns_work(*operation)) {
        made->impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&pass>());
      }
    }
    return made;
  }();
  static_cast<void>(kernels);
  installed = true;
}

std::size_t count_gloo_works(const c10d::ProcessGroup& group) {
  const auto all = open_ones(group);
  return static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [](const auto& one) { return one->is_collective(); }));
}

std::size_t end_gloo_works(const c10d::ProcessGroup& group, const std::string& why) {
  const auto error = std::make_exception_ptr(std::runtime_error(why));
  const auto all = open_ones(group);
  return static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [&](const auto& one) { return one->end(error); }));
}

}  // namespace ddp_lab
