// What our backends check of the tensors that a collective is given. `what` begins each message: "shm: broadcast".
// Mistakes are RuntimeErrors, as those of torch's own backends are.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp_lab {

inline void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.device().is_cpu(), what, " needs tensors on the CPU, this one is on ", tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided, what, " needs dense tensors");
}

inline const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, what, " takes one tensor, not ", tensors.size());
  check_tensor(tensors[0], what);
  return tensors[0];
}

// In place: elements may lie in any order, as long as they fill a piece of memory.
inline const at::Tensor& in_place(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), what,
              ": Tensors must be contiguous: it works in place, and this one of shape ", tensor.sizes(),
              " has strides ", tensor.strides());
  return tensor;
}

inline void check_contiguous(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK(tensor.is_contiguous(), what, ": Tensors must be contiguous");
}

inline void check_some(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK(!tensors.empty(), what, " requires non-empty tensor list");
}

inline void check_dtype(const at::Tensor& tensor, const at::Tensor& like, const char* what) {
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), what, " needs tensors of one dtype");
}

inline void check_same(const std::vector<at::Tensor>& tensors, const at::Tensor& like, const char* what) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, what);
    TORCH_CHECK(tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel(), what,
                " needs tensors of one dtype and size: one has ", tensor.numel(), " elements of ", tensor.scalar_type(),
                ", another ", like.numel(), " of ", like.scalar_type());
  }
}

inline void check_root(std::int64_t root, int size, const char* what) {
  TORCH_CHECK(root >= 0 && root < size, what, ": there is no rank ", root, " in a group of ", size);
}

inline void check_count(std::size_t found, int size, const char* what) {
  TORCH_CHECK(found == static_cast<std::size_t>(size), what, " needs a tensor for each of ", size, " ranks, not ",
              found);
}

// The one list of tensors, one for each rank; `side`: "input" or "output".
inline const std::vector<at::Tensor>& only_list(const std::vector<std::vector<at::Tensor>>& lists, int size,
                                                const char* side, const char* what) {
  TORCH_CHECK(lists.size() == 1, what, " takes one list of ", side, "s, not ", lists.size());
  check_count(lists[0].size(), size, what);
  return lists[0];
}

// The same where rank `root` alone has such a list, of tensors like this one; empty on other ranks.
inline std::vector<at::Tensor> list_of_root(const std::vector<std::vector<at::Tensor>>& lists, const at::Tensor& like,
                                            std::int64_t root, int rank, int size, const char* side, const char* what) {
  check_root(root, size, what);
  if (rank != root) {
    TORCH_CHECK(lists.empty(), what, ": requires empty ", side, " on non-root, rank ", rank);
    return {};
  }
  TORCH_CHECK(lists.size() == 1, what, " takes one list of ", side, "s on rank ", rank, ", not ", lists.size());
  check_same(only_list(lists, size, side, what), like, what);
  return lists[0];
}

}  // namespace ddp_lab
