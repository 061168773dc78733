// Where a parameter's gradient lives: in `.grad`, or in the context of a distributed backward (torch's RPC framework).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>

namespace torch::distributed::autograd {
class DistAutogradContext;
}

namespace ddp_lab {

// [Note: gradients in a distributed backward]
// `torch.distributed.autograd.backward` accumulates into a context that is passed from process to process and
// leaves `.grad` alone. The context is known to the thread that runs a hook (`current`), not to the one that ends
// the backward: whoever writes gradients back at the end keeps the access that the hook had.
class GradientAccess {
 public:
  // To `.grad`.
  GradientAccess() = default;
  // To what the calling thread's backward accumulates into.
  static GradientAccess current();

  // Calls `function(at::Tensor& gradient) -> bool`; true: it changed the gradient (undefined: there is none yet).
  // A context holds no gradient of a parameter that brought none: torch's own error says so.
  template <typename Function>
  void with(const at::Tensor& variable, Function&& function) const {
    if (context_) {
      with_context(variable, std::forward<Function>(function));
    } else {
      function(variable.mutable_grad());
    }
  }

  bool in_context() const noexcept { return context_ != nullptr; }

 private:
  void with_context(const at::Tensor& variable, const std::function<bool(at::Tensor&)>& function) const;

  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
};

}  // namespace ddp_lab
