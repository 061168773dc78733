#include "comm/collective_interception.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace ddp_lab {
namespace {

using c10d::Work;
using Made = c10::intrusive_ptr<Work>;
using GroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr std::string_view kLibrary = "c10d::";
// By their roles. The store publishes what the watcher uses: loaded with acquire before it is called.
std::array<std::atomic<Watcher>, 3> watchers{};
// Relaxed where it is loaded: a function that uses nothing which was made when it was set.
std::atomic<Replace> replace_made{nullptr};
thread_local Purpose purpose_here;

bool is_watched() {
  return std::any_of(watchers.begin(), watchers.end(),
                     [](const auto& one) { return one.load(std::memory_order_relaxed) != nullptr; });
}

void notify_end(const Watches& watches, bool failed) {
  for (const auto& one : watches) one->ended(failed);
}

// ---- what the arguments say

// 0 of a sparse tensor, whose size depends on what it holds.
std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

// Of a tensor or of (lists of) lists of tensors; -1 of anything else. `first` becomes the first one, if it is none yet.
std::int64_t bytes_of(const c10::IValue& value, at::Tensor& first) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return 0;
    if (!first.defined()) first = tensor;
    return bytes_of(tensor);
  }
  if (!value.isList()) return -1;
  std::int64_t sum = -1;
  for (const c10::IValue& element : value.toListRef()) {
    const std::int64_t bytes = bytes_of(element, first);
    if (bytes >= 0) sum = (sum < 0 ? 0 : sum) + bytes;
  }
  return sum;
}

c10::DispatchKeySet behind(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
}

Made handed_on(Made made, Watches watches, const c10d::ProcessGroup& group, int peer) {
  if (made) {
    if (const Replace replace = replace_made.load(std::memory_order_relaxed)) {
      made = replace(std::move(made), group, peer);
    }
    if (!watches.empty()) follow(std::move(watches), *made);
  } else {
    notify_end(watches, false);  // it was over when it returned
  }
  return made;
}

template <typename Call>
auto call_watched(const Watches& watches, const Call& call) {
  try {
    return call();
  } catch (...) {
    notify_end(watches, true);
    throw;
  }
}

// One operator: where its arguments are, found out once.
class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& operation)
      : name_(operation.schema().name().substr(kLibrary.size())),
        arguments_(operation.schema().arguments().size()),
        returns_work_(!operation.schema().returns().empty()) {
    std::size_t index = 0;
    for (const c10::Argument& argument : operation.schema().arguments()) {
      const std::string type = argument.type()->annotation_str();
      if (type.find("ProcessGroup") != std::string::npos) group_ = index;
      if (type.find("Tensor") != std::string::npos) tensors_.push_back(index);
      if (type.find("ReduceOp") != std::string::npos) reduction_ = index;
      if (argument.name() == "src" || argument.name() == "dst") peer_ = index;
      ++index;
    }
  }

  void operator()(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const GroupPointer group = torch::jit::peek(*stack, group_, arguments_).toCustomClass<c10d::ProcessGroup>();
    const int peer = peer_ ? static_cast<int>(torch::jit::peek(*stack, *peer_, arguments_).toInt()) : -1;
    Watches watches;
    if (is_watched()) {
      CollectiveCall call{name_.c_str(), *group};
      call.peer = peer;
      read(*stack, call);
      watches = watch(call);
    }
    call_watched(watches, [&] { operation.redispatchBoxed(behind(keys), stack); });
    if (!returns_work_) {
      notify_end(watches, false);
      return;
    }
    c10::IValue& last = stack->back();
    last = c10::IValue(handed_on(last.toCustomClass<Work>(), std::move(watches), *group, peer));
  }

 private:
  void read(const torch::jit::Stack& stack, CollectiveCall& call) const {
    const auto argument = [&](std::size_t index) -> const c10::IValue& {
      return torch::jit::peek(stack, index, arguments_);
    };
    for (const std::size_t index : tensors_) call.add(bytes_of(argument(index), call.first));
    if (reduction_) call.reduction = argument(*reduction_).toCustomClass<c10d::ReduceOp>()->op_;
  }

  const std::string name_;
  const std::size_t arguments_;
  const bool returns_work_;
  std::size_t group_ = 0;
  std::vector<std::size_t> tensors_;
  std::optional<std::size_t> reduction_;
  std::optional<std::size_t> peer_;
};

// ---- the most frequent ones, without a stack: that takes a microsecond

void read(CollectiveCall& call, const at::Tensor& tensor) {
  if (!call.first.defined()) call.first = tensor;
  call.add(bytes_of(tensor));
}

void read(CollectiveCall& call, at::TensorList tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& one : tensors) bytes += bytes_of(one);
  call.add(bytes);
  if (!tensors.empty()) call.first = tensors.front();
  if (tensors.size() == 1) call.summed = &tensors.front();
}

void read(CollectiveCall& call, const c10::intrusive_ptr<c10d::ReduceOp>& reduction) {
  call.reduction = reduction->op_;
}

template <typename Other>
void read(CollectiveCall&, const Other&) {}

template <typename... Rest>
const GroupPointer& group_in(const GroupPointer& group, const Rest&...) {
  return group;
}
template <typename Other, typename... Rest>
const GroupPointer& group_in(const Other&, const Rest&... rest) {
  return group_in(rest...);
}

// kName: of the operator, with "c10d::".
template <const char* kName, typename Signature>
struct Typed;

template <const char* kName, typename Returned, typename... Arguments>
struct Typed<kName, Returned(Arguments...)> {
  static Returned pass(c10::DispatchKeySet keys, Arguments... arguments) {
    static const auto operation =
        c10::Dispatcher::singleton().findSchemaOrThrow(kName, "").typed<Returned(Arguments...)>();
    const GroupPointer& group = group_in(arguments...);
    Watches watches;
    if (is_watched()) {
      CollectiveCall call{kName + kLibrary.size(), *group};
      (read(call, arguments), ...);
      watches = watch(call);
    }
    Returned made = call_watched(watches, [&] { return operation.redispatch(behind(keys), arguments...); });
    Made& work = std::get<1>(made);
    work = handed_on(std::move(work), std::move(watches), *group, /*peer=*/-1);
    return made;
  }
};

constexpr char kAllReduce[] = "c10d::allreduce_";
constexpr char kAllGather[] = "c10d::_allgather_base_";
constexpr char kReduceScatter[] = "c10d::_reduce_scatter_base_";
using Reduction = const c10::intrusive_ptr<c10d::ReduceOp>&;
using AllReduce =
    Typed<kAllReduce, std::tuple<std::vector<at::Tensor>, Made>(at::TensorList, const GroupPointer&, Reduction,
                                                                const std::optional<at::Tensor>&, bool, std::int64_t)>;
using AllGather =
    Typed<kAllGather, std::tuple<at::Tensor, Made>(at::Tensor&, at::Tensor&, const GroupPointer&, bool, std::int64_t)>;
using ReduceScatter = Typed<kReduceScatter, std::tuple<at::Tensor, Made>(at::Tensor&, at::Tensor&, const GroupPointer&,
                                                                         Reduction, bool, std::int64_t)>;

// Registers the typed kernel; false if this torch has the operator with other types.
template <typename Kernels>
bool register_typed(torch::Library& library, const char* name) {
  try {
    library.impl(name, TORCH_FN(Kernels::pass));
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

bool register_typed(torch::Library& library, const std::string& name) {
  const char* const bare = name.c_str() + kLibrary.size();
  if (name == kAllReduce) return register_typed<AllReduce>(library, bare);
  if (name == kAllGather) return register_typed<AllGather>(library, bare);
  return name == kReduceScatter && register_typed<ReduceScatter>(library, bare);
}

bool passes(const c10::OperatorHandle& operation) {
  return operation.schema().argumentIndexWithName("process_group").has_value();
}

}  // namespace

void set_watcher(Role role, Watcher watcher) {
  watchers[static_cast<std::size_t>(role)] = watcher;
  install_interceptors();
}

Watches watch(CollectiveCall& call) {
  Watches watches;
  call.purpose = purpose_here;
  if (call.first.defined() && call.first.is_meta()) return watches;  // nothing is communicated
  for (const auto& one : watchers) {
    const Watcher watcher = one.load(std::memory_order_acquire);
    if (watcher == nullptr) continue;
    if (auto made = watcher(call)) watches.push_back(std::move(made));
  }
  return watches;
}

void follow(Watches watches, Work& work) {
  if (watches.empty()) return;
  if (auto* const telling = dynamic_cast<ReportsWaits*>(&work)) {
    telling->tell(watches);
    if (!telling->has_future()) return;
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work.getFuture();
  } catch (const c10::Error&) {  // sends and receives of some backends have none
  }
  if (!future) {
    for (const auto& one : watches) one->ends_unseen();
    return;
  }
  for (auto& one : watches) {
    const bool on_device = one->on_device();
    future->addCallback([one = std::move(one)](c10::ivalue::Future& done) { one->ended(done.hasError()); },
                        /*uses_future=*/on_device);
  }
}

Purpose set_purpose(Purpose purpose) { return std::exchange(purpose_here, purpose); }

WithPurpose::WithPurpose(Purpose purpose) : before_(set_purpose(purpose)) {}

WithPurpose::~WithPurpose() { purpose_here = before_; }

void replace_works(Replace replace) {
  replace_made = replace;
  install_interceptors();
}

void install_interceptors() {
  static auto* const kernels = [] {
    auto* const made = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__,
                                          static_cast<std::uint32_t>(__LINE__));
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (!name.name.starts_with(kLibrary)) continue;
      const auto operation = dispatcher.findSchema(name);
      if (!operation || !passes(*operation) || register_typed(*made, name.name)) continue;
      made->impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*operation)));
    }
    return made;
  }();
  static_cast<void>(kernels);
}

}  // namespace ddp_lab
