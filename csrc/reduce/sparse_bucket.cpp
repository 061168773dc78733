// Bucket's part for a parameter with sparse gradients (an embedding with sparse=True).
//
// Such a gradient is not copied: it is the buffer. Ranks touch different rows, and the collective sums them up.
//
// [Note: known rows]
// If all ranks know the rows that any of them can touch in this step (`_set_sparse_metadata`), the buffer holds
// exactly these rows, as a dense tensor: an ordinary collective, on every backend, and a gradient with these rows.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "reduce/bucket.h"

namespace ddp_lab {

void Bucket::set_known_rows(const at::Tensor& rows) {
  TORCH_CHECK(sparse_, "sparse metadata was given for '", slots_.front().name,
              "', whose gradient is not expected to be sparse");
  if (!rows.defined()) {
    known_rows_ = at::Tensor();
    return;
  }
  const at::NoGradGuard no_grad;
  known_rows_ = std::get<0>(at::_unique(rows.to(device(), at::kLong).reshape({-1}), /*sorted=*/true));
}

std::optional<at::Tensor> Bucket::known_rows() const {
  return known_rows_.defined() ? std::optional<at::Tensor>(known_rows_) : std::nullopt;
}

bool Bucket::copy_in_sparse(at::Tensor& gradient, int divisor) {
  const std::string& name = slots_.front().name;
  TORCH_CHECK(gradient.defined(), "Expected sparse gradient to be defined. '", name,
              "' took no part in computing the loss, or its gradient is undefined: use it in every backward, or build ",
              "it with sparse=False.");
  TORCH_CHECK(gradient.layout() == at::kSparse, "Expected variable to have sparse gradient. The gradient of '", name,
              "' is dense this time: use the module that was built with sparse=True in one way only.");
  const at::NoGradGuard no_grad;
  if (known_rows_.defined()) {
    buffer_ = known_rows_of(gradient);
    if (divisor != 1) buffer_.div_(divisor);
    return false;
  }
  if (divisor != 1) gradient.div_(divisor);
  buffer_ = gradient;
  return true;
}

at::Tensor Bucket::known_rows_of(const at::Tensor& gradient) const {
  const at::Tensor touched = gradient.coalesce();
  const at::Tensor rows = touched.indices().select(0, 0);
  const at::Tensor places = at::searchsorted(known_rows_, rows);
  std::vector<std::int64_t> sizes = gradient.sizes().vec();
  sizes[0] = known_rows_.numel();
  if (rows.numel() > 0) {
    const bool known = sizes[0] > 0 && known_rows_.index_select(0, places.clamp_max(sizes[0] - 1)).equal(rows);
    TORCH_CHECK(
        known, "the gradient of '", slots_.front().name,
        "' has rows that are not in the sparse metadata: _set_sparse_metadata needs every row that any rank uses");
  }
  return at::zeros(sizes, options_).index_copy_(0, places, touched.values());
}

void Bucket::copy_out_sparse(const at::Tensor& reduced, const GradientAccess& access, Skip skip) {
  if (skip && skip(0)) return;
  const Slot& slot = slots_.front();
  at::Tensor result = reduced;
  if (known_rows_.defined() && reduced.layout() != at::kSparse) {
    result = at::_sparse_coo_tensor_unsafe(known_rows_.unsqueeze(0), reduced, slot.variable.sizes(),
                                           options_.layout(at::kSparse), /*is_coalesced=*/true);
  }
  access.with(slot.variable, [&](at::Tensor& gradient) {
    gradient = result;
    return true;
  });
  buffer_ = at::Tensor();
}

}  // namespace ddp_lab
