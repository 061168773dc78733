// OutputHook: what autograd calls when the gradient of an output of forward is known.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <utility>

namespace ddp_lab {

// The reducer's hooks run C++ in the middle of a backward, which can't be traced. In torch's words: people search
// for them.
[[noreturn]] inline void refuse_compiled_autograd() {
  TORCH_CHECK(false,
              "Compiled autograd is not compatible with C++ DDP Reducer, please use "
              "torch._dynamo.config.optimize_ddp=\"python_reducer\".");
}

// Not `Tensor::register_hook`, whose hooks answer compiled autograd with an internal name.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::function<void()> called) : called_(std::move(called)) {}

  static void add(const at::Tensor& output, std::function<void()> called) {
    output.grad_fn()->add_tensor_pre_hook(std::make_unique<OutputHook>(std::move(called)));
  }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    called_();
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

 private:
  const std::function<void()> called_;
};

}  // namespace ddp_lab
