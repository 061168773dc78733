// The class `ddp_lab._C.Observation`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "observe/observation.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// [(norm, checksum)] of each bucket, or None while the gradients are changing.
py::object inspect_gradients(const Observation& observation) {
  const auto gradients = observation.gradients();
  if (!gradients) return py::none();
  Observation::Inspections found;
  {
    const py::gil_scoped_release no_gil;
    for (const auto& bucket : *gradients) found.push_back(inspect(bucket));
  }
  py::list list;
  for (const Inspection& one : found) list.append(py::make_tuple(one.norm, one.checksum));
  return list;
}

std::shared_ptr<Observation> make(const std::shared_ptr<c10d::Reducer>& reducer, std::vector<at::Tensor> parameters,
                                  std::int32_t reducer_id, std::int32_t process_group_index, bool static_graph) {
  return std::make_shared<Observation>(reducer, std::move(parameters),
                                       Observation::Identity{reducer_id, process_group_index, static_graph});
}

}  // namespace

void bind_observation(py::module_& module) {
  module.def(
      "parameters_of",
      [](const std::shared_ptr<c10d::Reducer>& reducer) { return Observation::parameters_of(*reducer); },
      "The parameters in the buckets of torch's reducer, in bucket order.", py::arg("reducer"));
  py::class_<Observation, std::shared_ptr<Observation>>(module, "Observation",
                                                        "Records what torch's reducer does with one model.")
      .def(py::init(&make), py::arg("reducer"), py::arg("parameters"), py::arg("reducer_id"),
           py::arg("process_group_index"), py::arg("static_graph"))
      .def("start", &Observation::start, NoGil())
      .def("stop", &Observation::stop, NoGil())
      .def("read_buckets", &Observation::read_buckets, "For each bucket its parameters' indices.", py::arg("rebuilt"),
           NoGil())
      .def("set_process_group_index", &Observation::set_process_group_index, py::arg("index"))
      .def("begin_forward", &Observation::begin_forward, py::arg("sync"), NoGil())
      .def("end_forward", &Observation::end_forward, py::arg("outputs"), py::arg("sync"), NoGil())
      .def("on_gradient", &Observation::on_gradient, py::arg("parameter"), NoGil())
      .def("step", &Observation::step)
      .def("generation", &Observation::generation)
      .def("inspect", &inspect_gradients);
}

}  // namespace ddp_lab
