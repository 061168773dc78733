// Bucket's gradients that are reduced where they are.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>

#include "reduce/bucket.h"
#include "reduce/comm_hook.h"

namespace ddp_lab {

namespace {

// See [Note: reduced in place]. 0: not known yet.
std::atomic<std::size_t> fresh_references{0};

// How many references to its memory a gradient may have that nobody shares.
std::size_t references_of_its_own(const at::Tensor& gradient, const at::Tensor& arrived) {
  if (!arrived.defined() || !arrived.has_storage() || !gradient.is_alias_of(arrived)) return 1;
  const bool with_base = arrived.is_view() && arrived._base().use_count() == 1;
  return fresh_references + (with_base ? 1 : 0);
}

}  // namespace

// [Note: reduced in place]
// A backend that sums pieces ("shm") needs no flat buffer: it reads gradients where autograd has left them and writes
// the averages there, or, with gradient_as_bucket_view, into the views. Then nothing is copied into the buffer or out
// of it, and its pages are never touched. Which gradients take that way is each rank's own affair, as for the others
// the array is the same. These go through the buffer: those whose memory anything else refers to, that carry a graph,
// whose strides are not their slot's, that did not arrive in this backward (what no rank uses must stay as it is), and
// all while a comm hook, a breakpoint or somebody who watches wants to see the buffer. While the collective is under
// way the gradient is neither this rank's nor the average.
//
// Memory that is shared must not be written to: autograd takes over what arrives as the gradient, and that may be a
// view of what the rest of the backward still reads. References to the memory tell, but in the hook autograd itself has
// some. How many is learned from a gradient that nobody shares; more of them mean a copy, and so do any if the gradient
// was there before and what arrived was added to it.
bool Bucket::take_in_place(std::size_t index, const at::Tensor& gradient, const at::Tensor& arrived, bool as_view) {
  if (!cpu_ || sparse_ || batched_ || !scales() || !gradient.defined() || gradient.requires_grad()) {
    return false;
  }
  const Slot& slot = ready(index);
  if (!plain(slot, gradient)) return false;
  if (!is_view(index, gradient) && gradient.storage().use_count() > references_of_its_own(gradient, arrived)) {
    return false;
  }
  in_place_.resize(slots_.size());
  in_place_[index] = {gradient, as_view ? slot.view : gradient};
  return true;
}

void learn_references(const at::Tensor& leaf) {
  using Pointer = decltype(torch::autograd::impl::grad_accumulator(leaf));
  static auto* const kept = new Pointer;  // the leaf itself holds it weakly
  *kept = torch::autograd::impl::grad_accumulator(leaf);
  const auto variable = std::make_shared<at::Tensor>(leaf);
  (*kept)->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [variable](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list& inputs) {
        const at::Tensor& gradient = variable->grad();
        if (gradient.defined() && !inputs.empty() && gradient.is_alias_of(inputs[0])) {
          fresh_references = gradient.storage().use_count();
        }
        variable->reset();
        return outputs;
      },
      [](torch::autograd::CompiledNodeArgs&) {}));
}

std::pair<std::vector<SumPiece>, std::vector<at::Tensor>> Bucket::pieces() const {
  std::vector<SumPiece> found;
  std::vector<at::Tensor> kept{buffer_};
  const auto item = options_.dtype().itemsize();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const InPlace& own = in_place_[i];
    const bool taken = own.source.defined();
    const at::Tensor& source = taken ? own.source : slots_[i].view;
    const at::Tensor& target = taken ? own.target : slots_[i].view;
    SumPiece piece{static_cast<const std::byte*>(source.const_data_ptr()),
                   static_cast<std::byte*>(target.mutable_data_ptr()), static_cast<std::size_t>(slots_[i].numel) * item,
                   taken};
    if (taken) kept.insert(kept.end(), {source, target});
    const bool goes_on = !found.empty() && found.back().scaled == taken &&
                         found.back().source + found.back().bytes == piece.source &&
                         found.back().target + found.back().bytes == piece.target;
    if (goes_on) {
      found.back().bytes += piece.bytes;
    } else if (piece.bytes != 0) {
      found.push_back(piece);
    }
  }
  return {std::move(found), std::move(kept)};
}

at::Tensor Bucket::first_part(const at::Tensor& reduced) const {
  if (!in_place()) return reduced;
  std::size_t first = 0;  // parameters may have no elements
  while (first + 1 < slots_.size() && slots_[first].numel == 0) ++first;
  return in_place_[first].source.defined() ? in_place_[first].target : slots_[first].view;
}

bool Bucket::copy_from_in_place(std::size_t slot, at::Tensor& gradient) const {
  if (!in_place() || !in_place_[slot].source.defined()) return false;
  const InPlace& own = in_place_[slot];
  if (!gradient.is_same(own.target)) {  // something has assigned another one meanwhile
    if (gradient.defined()) {
      gradient.copy_(own.target);
    } else {
      gradient = own.target;
    }
  } else {
    gradient.unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

Launched start_pieces(PiecewiseBackend& backend, const Bucket& bucket, int divisor) {
  auto [pieces, kept] = bucket.pieces();
  Launched launched;
  launched.work = backend.sum_pieces(bucket.buffer(), std::move(pieces), 1.0 / divisor, std::move(kept));
  launched.future = launched.work->getFuture();
  return launched;
}

}  // namespace ddp_lab
