// What checks need: a log of collectives, checksums of tensors, watched gradients.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "observe/collective_log.h"
#include "reduce/inspection.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

// (name, ranks, bytes of each argument, begin_ns, end_ns) of each.
py::list collectives() {
  py::list list;
  for (const Collective& one : take_collectives()) {
    list.append(py::make_tuple(one.name, one.ranks, one.bytes, one.begin_ns, one.end_ns));
  }
  return list;
}

}  // namespace

void bind_checks(py::module_& module) {
  module.def("open_collective_log", &open_collective_log, "See csrc/observe/collective_log.h.");
  module.def("close_collective_log", &close_collective_log);
  module.def("take_collectives", &collectives);
  module.def("checksum", &checksum_of, "64 bits of the tensor's bytes in logical order.", py::arg("tensor"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace ddp_lab
