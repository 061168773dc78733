// Groups in shared memory; the Python face is ddp_lab/comm/shared_memory.py.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "comm/shared_memory/backend.h"

namespace py = pybind11;

namespace ddp_lab {

namespace {

using shared_memory::Backend;
using shared_memory::Group;
using shared_memory::Segment;

c10::intrusive_ptr<c10d::Backend> make_backend(Segment& segment, const c10::intrusive_ptr<c10d::Backend>& gloo,
                                               int rank, const std::vector<int>& pids,
                                               std::chrono::milliseconds timeout) {
  auto group = std::make_unique<Group>(std::move(segment), rank, static_cast<int>(pids.size()), pids);
  return c10::make_intrusive<Backend>(std::move(group), gloo, timeout);
}

bool is_broken(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto* const ours = dynamic_cast<const Backend*>(backend.get());
  return ours != nullptr && ours->broken();
}

}  // namespace

void bind_comm(py::module_& module) {
  py::class_<Segment>(module, "Segment")
      .def_static("create", &Segment::create, py::arg("bytes"))
      .def_static("attach", &Segment::attach, py::arg("pid"), py::arg("descriptor"), py::arg("bytes"))
      .def_property_readonly("descriptor", &Segment::descriptor)
      .def("close_descriptor", &Segment::close_descriptor);
  module.def("shared_memory_bytes", &Group::bytes_for, "Bytes of the segment of a group.", py::arg("size"));
  module.def("shared_memory_backend", &make_backend, "The c10d backend; the segment is taken from its owner.",
             py::arg("segment"), py::arg("gloo"), py::arg("rank"), py::arg("pids"), py::arg("timeout"));
  module.def("shared_memory_broken", &is_broken, "Whether it is such a backend and of no use any more.",
             py::arg("backend"));
}

}  // namespace ddp_lab
