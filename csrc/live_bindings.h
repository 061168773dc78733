// What can be done to a reducer while training runs.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "reduce/reducer.h"

namespace ddp_lab {

void bind_live(pybind11::class_<Reducer, std::shared_ptr<Reducer>>& reducer);

}  // namespace ddp_lab
