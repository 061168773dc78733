// The class `ddp_lab._C.Reducer`, in parts that compile side by side.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "reduce/reducer.h"

namespace ddp_lab {

using ReducerClass = pybind11::class_<Reducer, std::shared_ptr<Reducer>>;
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// What libraries call on `model.reducer`, by torch's names.
void bind_torch_names(ReducerClass& reducer);
// For inputs that are uneven between ranks, for no_sync, and for work of the forward pass.
void bind_joining(ReducerClass& reducer);
// Norms, checksums and watched gradients.
void bind_inspection(ReducerClass& reducer);
// What can be done to a reducer while training runs.
void bind_live(ReducerClass& reducer);

// Arms the reducer; warnings become Python's.
void arm(Reducer& reducer, const std::vector<at::Tensor>& outputs, bool sync);

}  // namespace ddp_lab
