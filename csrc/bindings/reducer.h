// The class `ddp_lab._C.Reducer`, in parts that compile side by side.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "reduce/reducer.h"

namespace ddp_lab {

using ReducerClass = pybind11::class_<Reducer, std::shared_ptr<Reducer>>;

// Norms, checksums and watched gradients.
void bind_inspection(ReducerClass& reducer);

}  // namespace ddp_lab
