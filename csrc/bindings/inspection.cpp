// Of the class `ddp_lab._C.Reducer`: norms, checksums and watched gradients.
#include "bindings/inspection.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/reducer.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

// A Python object that C++ may drop without the GIL.
std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

py::list to_list(const Inspections& inspections) {
  py::list list;
  for (const Inspection& found : inspections) list.append(py::make_tuple(found.norm, found.checksum));
  return list;
}

// [(norm, checksum)] of each bucket, or None during a backward. The thread that trains alone.
py::object inspect_gradients(const Reducer& reducer) {
  std::optional<Inspections> found;
  {
    const py::gil_scoped_release no_gil;
    found = reducer.inspect_gradients();
  }
  return found ? py::object(to_list(*found)) : py::none();
}

// (step, [(norm, checksum)]) of what the last backward has averaged, or None. Any thread.
py::object inspect_averages(const Reducer& reducer) {
  std::int64_t step = 0;
  std::optional<Inspections> found;
  if (std::optional<Reducer::Averages> averages = reducer.averages()) {
    const py::gil_scoped_release no_gil;
    step = averages->step;
    found = inspect_unchanged(averages->buckets);
    averages.reset();
  }
  return found ? py::object(py::make_tuple(step, to_list(*found))) : py::none();
}

void set_inspection_callback(Reducer& reducer, py::object callback) {
  const auto call = inspection_callback(std::move(callback));
  const py::gil_scoped_release no_gil;
  reducer.set_inspection_callback(call);
}

// callback(step, (before, after, parameter, position, nan, parameters, host_ns)) -> what the backward is to raise, or
// "".
void watch_gradients(Reducer& reducer, std::int64_t every, py::object callback) {
  std::shared_ptr<GradientWatch> watch;
  if (every > 0) {
    const auto call = [held = hold(std::move(callback))](std::int64_t step, const GradientWatch::Found& found) {
      const py::gil_scoped_acquire gil;
      try {
        const auto told = py::make_tuple(found.before, found.after, found.parameter, found.position, found.nan,
                                         found.parameters, found.host_ns);
        return (*held)(step, told).cast<std::string>();
      } catch (const py::error_already_set& error) {
        return std::string(error.what());
      }
    };
    watch = std::make_shared<GradientWatch>(every, call);
  }
  const py::gil_scoped_release no_gil;
  reducer.set_gradient_watch(std::move(watch));
}

}  // namespace

Inspector::Callback inspection_callback(py::object callback) {
  return [held = hold(std::move(callback))](std::int64_t step, const Inspections& found) {
    const py::gil_scoped_acquire gil;
    (*held)(step, to_list(found));
  };
}

void bind_inspection(ReducerClass& reducer) {
  reducer.def("inspect_gradients", &inspect_gradients)
      .def("inspect_averages", &inspect_averages)
      .def("request_inspection", &Reducer::request_inspection, py::arg("from_step"))
      .def("inspection_pending", &Reducer::inspection_pending)
      .def("set_inspection_callback", &set_inspection_callback, py::arg("callback"))
      .def("watch_gradients", &watch_gradients, py::arg("every"), py::arg("callback"));
}

}  // namespace ddp_lab
