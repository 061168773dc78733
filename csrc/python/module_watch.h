#pragma once
#include <pybind11/pybind11.h>

namespace ddp_lab {

// Binds `ModuleWatch`; its Python side is ddp_lab/parallel/core/parameters.py.
void bind_module_watch(pybind11::module_& module);

}  // namespace ddp_lab
