// AutogradHooks: what autograd calls in a backward, and what it can be asked there. Guarded by its owner's mutex.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "reduce/warnings.h"

namespace ddp_lab {

class AutogradHooks {
 public:
  // `arrived`: what was accumulated, if anything.
  using OnGradient = std::function<void(const torch::autograd::variable_list& arrived)>;
  using OnOldAccumulator = std::function<void(std::size_t parameter)>;

  // `called` when the gradient of this leaf has been accumulated; `first`: before the hooks that are there.
  void add(const at::Tensor& parameter, OnGradient called, bool first = false);
  void remove();
  // Moves the hooks of parameters that have got another accumulator. Returns whether there were any.
  //
  // [Note: accumulators that are replaced] A tensor gets a new accumulator when its data is replaced by data of another
  // dtype or device: `model.double(); model.float()` leaves each parameter as it was, but for that. A hook on the old
  // one would never be called again, and gradients would be averaged no more, without a word. A forward may do that
  // itself, so the hooks move at its end: the graph that it has built holds the accumulators of its backward. An old
  // one can only be part of a graph that was built earlier; if it is used after all, `on_old` is called.
  bool follow(const std::vector<at::Tensor>& parameters, const OnOldAccumulator& on_old);
  bool empty() const noexcept { return hooks_.empty(); }
  // What accumulates each parameter's gradient; alive until remove().
  std::vector<const torch::autograd::Node*> accumulators() const;

  // `called` when the gradient of an output of forward is known.
  template <typename Function>
  static void watch(const std::vector<at::Tensor>& outputs, const Function& called) {
    for (const at::Tensor& output : outputs) {
      if (output.defined() && output.grad_fn()) watch_output(output, called);
    }
  }
  // What it was called for counts as long as this number stays the same.
  std::uint64_t epoch() const noexcept { return epoch_; }
  void forget_outputs() noexcept { ++epoch_; }

  // False in torch.autograd.grad and in backward(inputs=...) without parameters: they accumulate no gradient of ours.
  // Notes the first one, with the name of the parameter; null: it is not to.
  bool gradients_wanted(const std::vector<std::string>& names, Notices* notices);

 private:
  static void watch_output(const at::Tensor& output, std::function<void()> called);

  // c10::intrusive_ptr since torch 2.13, std::shared_ptr before.
  using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  struct Hook {
    NodePointer node;  // a variable holds its accumulator weakly, so it is kept here, or the hook would be lost with it
    std::uintptr_t key;
    OnGradient called;
    bool first;
  };

  static Hook made(const at::Tensor& parameter, OnGradient called, bool first);

  std::vector<Hook> hooks_;  // in the order of their parameters
  std::uint64_t epoch_ = 0;
};

}  // namespace ddp_lab
