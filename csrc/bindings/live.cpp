// The part of `ddp_lab._C.Reducer` that is for pauses, rehearsals and live changes.
#include <pybind11/stl.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "bindings/reducer.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

// Lets a signal end a pause on the main thread; on others there are none.
void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void set_breakpoints(Reducer& reducer, const Breakpoints::Points& points, std::vector<std::size_t> parameters,
                     std::vector<std::size_t> buckets) {
  reducer.set_pause_check(check_signals);
  reducer.breakpoints().set(points, std::move(parameters), std::move(buckets));
}

// A dict; "pause" is (point, index, step, since in ns) or None.
py::dict stage(const Reducer& reducer) {
  Reducer::Stage found;
  {
    const py::gil_scoped_release no_gil;
    found = reducer.stage();
  }
  py::list buckets;
  for (const BucketReport& of : found.buckets) {
    buckets.append(py::make_tuple(of.first_ready, of.ready, of.launched, of.reduced));
  }
  py::dict made;
  made["step"] = found.step;
  made["generation"] = found.generation;
  made["in_flight"] = found.in_flight;
  made["finalizing"] = found.finalizing;
  made["buckets"] = buckets;
  made["missing"] = found.missing;
  made["pause"] = py::none();
  if (found.pause) {
    made["pause"] = py::make_tuple(static_cast<int>(found.pause->point), found.pause->index, found.pause->step,
                                   found.pause->since_ns);
  }
  return made;
}

}  // namespace

void bind_live(ReducerClass& reducer) {
  reducer
      .def("set_breakpoints", &set_breakpoints, NoGil(), py::arg("points"), py::arg("parameters"), py::arg("buckets"))
      .def(
          "clear_breakpoints", [](Reducer& self) { self.breakpoints().clear(); }, NoGil())
      .def(
          "go_on", [](Reducer& self, const Breakpoints::Points& next) { return self.breakpoints().go_on(next); },
          NoGil(), py::arg("next"))
      .def(
          "end_pause", [](Reducer& self, const std::string& why) { self.breakpoints().end(why); }, NoGil(),
          py::arg("why"))
      .def("stage", &stage)
      .def("drop_next", &Reducer::drop_next, NoGil(), py::arg("parameter"))
      .def("clear_comm_hook", &Reducer::clear_comm_hook, NoGil())
      .def("finished", &Reducer::finished, NoGil())
      .def("set_finished", &Reducer::set_finished, NoGil(), py::arg("finished"));
}

}  // namespace ddp_lab
