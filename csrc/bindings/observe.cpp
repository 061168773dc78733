// The class `ddp_lab._C.Observation`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/inspection.h"
#include "bindings/reducer.h"
#include "observe/observation.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

void set_observation_callback(Observation& observation, py::object callback) {
  const auto call = inspection_callback(std::move(callback));
  const py::gil_scoped_release no_gil;
  observation.set_inspection_callback(call);
}

std::shared_ptr<Observation> make(const std::shared_ptr<c10d::Reducer>& reducer, std::vector<at::Tensor> parameters,
                                  std::int32_t reducer_id, std::int32_t process_group_index, bool static_graph) {
  return std::make_shared<Observation>(reducer, std::move(parameters), EventOrigin{reducer_id, process_group_index},
                                       static_graph);
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
      .def("update", &Observation::update, py::arg("process_group_index"), py::arg("static_graph"), NoGil())
      .def("begin_forward", &Observation::begin_forward, py::arg("sync"), NoGil())
      .def("end_forward", &Observation::end_forward, py::arg("outputs"), py::arg("sync"), NoGil())
      .def("on_gradient", &Observation::on_gradient, py::arg("parameter"), NoGil())
      .def("step", &Observation::step, NoGil())
      .def("generation", &Observation::generation, NoGil())
      // Of torch's buckets nobody else can tell when they hold averages: a request waits for the next backward's end.
      .def("inspect_averages", [](const Observation&) { return py::none(); })
      .def("request_inspection", &Observation::request_inspection, py::arg("from_step"))
      .def("inspection_pending", &Observation::inspection_pending)
      .def("set_inspection_callback", &set_observation_callback, py::arg("callback"));
}

}  // namespace ddp_lab
