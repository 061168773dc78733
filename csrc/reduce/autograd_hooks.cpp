#include "reduce/autograd_hooks.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>

#include "reduce/messages.h"

namespace ddp_lab {
namespace {

using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

// The hooks run C++ in the middle of a backward, which can't be traced. In torch's words: people search for them.
[[noreturn]] void refuse_compiled_autograd() {
  TORCH_CHECK(false,
              "Compiled autograd is not compatible with C++ DDP Reducer, please use "
              "torch._dynamo.config.optimize_ddp=\"python_reducer\".");
}

class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit GradientHook(AutogradHooks::OnGradient called) : called_(std::move(called)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    called_(inputs);
    return outputs;
  }

  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

 private:
  const AutogradHooks::OnGradient called_;
};

// Not `Tensor::register_hook`, whose hooks answer compiled autograd with an internal name.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::function<void()> called) : called_(std::move(called)) {}

  variable_list operator()(const variable_list& gradients) override {
    called_();
    return gradients;
  }

  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

 private:
  const std::function<void()> called_;
};

// What is captured goes back to the caller of torch.autograd.grad, or, by a hook, into a distributed backward's
// context.
template <typename Captures>
bool accumulates(const Captures& captures) {
  return std::any_of(captures.begin(), captures.end(),
                     [](const auto& capture) { return !capture.DO_NOT_USE_DEPRECATED_get_capture_hooks().empty(); });
}

}  // namespace

AutogradHooks::Hook AutogradHooks::made(const at::Tensor& parameter, OnGradient called, bool first) {
  NodePointer node = torch::autograd::impl::grad_accumulator(parameter);
  const std::uintptr_t key = node->add_post_hook(std::make_unique<GradientHook>(called));
  auto& hooks = node->post_hooks();
  if (first) std::rotate(hooks.begin(), hooks.end() - 1, hooks.end());
  return {std::move(node), key, std::move(called), first};
}

void AutogradHooks::add(const at::Tensor& parameter, OnGradient called, bool first) {
  hooks_.push_back(made(parameter, std::move(called), first));
}

bool AutogradHooks::follow(const std::vector<at::Tensor>& parameters, const OnOldAccumulator& on_old) {
  bool any = false;
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    Hook& hook = hooks_[i];
    if (!parameters[i].requires_grad()) continue;  // it is frozen: the model is about to be looked at anew
    if (torch::autograd::impl::try_get_grad_accumulator(parameters[i]) == hook.node) continue;
    hook.node->del_post_hook(hook.key);
    hook.node->add_post_hook(std::make_unique<GradientHook>([on_old, i](const variable_list&) { on_old(i); }));
    hook = made(parameters[i], std::move(hook.called), hook.first);
    any = true;
  }
  return any;
}

void AutogradHooks::remove() {
  for (const Hook& hook : hooks_) hook.node->del_post_hook(hook.key);
  hooks_.clear();
}

std::vector<const torch::autograd::Node*> AutogradHooks::accumulators() const {
  std::vector<const torch::autograd::Node*> found;
  for (const Hook& hook : hooks_) found.push_back(hook.node.get());
  return found;
}

void AutogradHooks::watch_output(const at::Tensor& output, std::function<void()> called) {
  output.grad_fn()->add_tensor_pre_hook(std::make_unique<OutputHook>(std::move(called)));
}

bool AutogradHooks::gradients_wanted(const std::vector<std::string>& names, Notices* notices) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return true;
  bool any = false;
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    const auto found = wanted->find(hooks_[i].node.get());
    if (found == wanted->end()) continue;
    any = any || found->second.needed_;
    if (!found->second.captures_) continue;
    if (accumulates(*found->second.captures_)) {
      any = true;
    } else if (notices != nullptr && !notices->own_gradients) {
      notices->own_gradients = true;
      notices->unsaid.add(messages::own_gradients(names[i]));
    }
  }
  return any;
}

}  // namespace ddp_lab
