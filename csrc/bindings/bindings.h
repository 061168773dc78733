// The parts of `ddp_lab._C` that have a file of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace ddp_lab {

void bind_reducer(pybind11::module_& module);
void bind_observation(pybind11::module_& module);
void bind_checks(pybind11::module_& module);
void bind_comm(pybind11::module_& module);

}  // namespace ddp_lab
