// The parts of `ddp_lab._C` that have a file of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace ddp_lab {

// [Note: plain functions]
// What a step calls for each parameter group (`record`, `set_purpose`) is a function of CPython's, not of pybind11's.
// In a loop both ways take 0.1 to 0.2 us. But between two calls a training step pushes everything out of the caches,
// and then pybind11's takes up to a microsecond more: observing a group cost 30 us of a step with it, 23 us without.

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// What `ask` returns, asked without the GIL.
template <typename Ask>
auto without_gil(const Ask& ask) {
  const pybind11::gil_scoped_release no_gil;
  return ask();
}

void bind_grad_bucket(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_observation(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
// Its Python side is ddp_lab/parallel/core/parameters.py.
void bind_module_watch(pybind11::module_& module);

}  // namespace ddp_lab
