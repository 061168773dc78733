// The pointer type of autograd's nodes: c10::intrusive_ptr since torch 2.13, std::shared_ptr before.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace ddp_lab {

using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

}  // namespace ddp_lab
