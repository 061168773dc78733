// What a reducer is made with.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

namespace ddp_lab {

struct ReducerOptions {
  std::vector<std::string> names;  // qualified, in the order of registration
  std::string module;              // what messages call the user's module
  bool gradient_as_bucket_view = false;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool skip_all_reduce_unused_params = false;  // the user answers for equal unused parameters on all ranks
  bool batched_grad_copy = false;
  bool lazy_bucket_allocation = false;  // see [Note: buffers on demand]
  std::vector<bool> expect_sparse;      // by parameter; empty: none
  std::optional<at::ScalarType> dtype;  // of the gradients, if not the parameters' (mixed precision)
  // By parameter: an optimizer runs as soon as its gradient is averaged and drops it, so that an absent one stays
  // absent.
  std::vector<bool> optimized;  // empty: none
};

}  // namespace ddp_lab
