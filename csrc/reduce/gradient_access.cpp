#include "reduce/gradient_access.h"

#include <torch/csrc/distributed/autograd/context/context.h>

namespace ddp_lab {

using torch::distributed::autograd::ThreadLocalDistAutogradContext;

GradientAccess GradientAccess::current() {
  GradientAccess access;
  access.context_ = ThreadLocalDistAutogradContext::getContextPtr();
  return access;
}

void GradientAccess::with_context(const at::Tensor& variable, const std::function<bool(at::Tensor&)>& function) const {
  context_->runGradCallbackForVariable(variable, function);
}

}  // namespace ddp_lab
