// What is seen of a training: norms, checksums and watched gradients of the reducer, the class
// `ddp_lab._C.Observation`, and a log of collectives.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/reducer.h"
#include "observe/collective_log.h"
#include "observe/group_collectives.h"
#include "observe/observation.h"
#include "observe/tensor_memory.h"
#include "python/call_places.h"

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
  const std::optional<Inspections> found = without_gil([&] { return reducer.inspect_gradients(); });
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

// callback(step, [(norm, checksum) of each bucket]), which any thread may call and drop without the GIL.
template <typename Inspected>
void set_inspection_callback(Inspected& inspected, py::object callback) {
  const auto call = [held = hold(std::move(callback))](std::int64_t step, const Inspections& found) {
    const py::gil_scoped_acquire gil;
    (*held)(step, to_list(found));
  };
  const py::gil_scoped_release no_gil;
  inspected.set_inspection_callback(call);
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

std::shared_ptr<Observation> make(const std::shared_ptr<c10d::Reducer>& reducer, std::vector<at::Tensor> parameters,
                                  std::int32_t reducer_id, std::int32_t process_group_index, bool static_graph) {
  return std::make_shared<Observation>(reducer, std::move(parameters), EventOrigin{reducer_id, process_group_index},
                                       static_graph);
}

// (name, ranks, bytes of each argument, begin_ns, end_ns) of each.
py::list collectives() {
  py::list list;
  for (const Collective& one : take_collectives()) {
    list.append(py::make_tuple(one.name, one.ranks, one.bytes, one.begin_ns, one.end_ns));
  }
  return list;
}

// (index, name, description, backend, size) of each.
py::list new_groups() {
  py::list list;
  for (const NamedGroup& one : take_new_groups()) {
    list.append(py::make_tuple(one.index, one.name, one.description, one.backend, one.size));
  }
  return list;
}

// See [Note: plain functions].
PyObject* exchange_purpose(PyObject* /*module*/, PyObject* arguments) {
  Purpose purpose;
  int use = 0;
  if (!PyArg_ParseTuple(arguments, "iii:set_purpose", &purpose.reducer, &purpose.bucket, &use)) return nullptr;
  if (use < 0 || use >= static_cast<int>(kUses.size())) {
    return PyErr_Format(PyExc_IndexError, "there is no use %d", use);
  }
  purpose.use = static_cast<Use>(use);
  const Purpose before = set_purpose(purpose);
  return Py_BuildValue("iii", before.reducer, before.bucket, static_cast<int>(before.use));
}

PyMethodDef plain_functions[] = {
    {"set_purpose", &exchange_purpose, METH_VARARGS,
     "set_purpose($module, reducer, bucket, use, /)\n--\n\n"
     "What collectives of this thread are for, from now on: model, bucket, number of the use. Returns the former."},
    {nullptr, nullptr, 0, nullptr}};

void bind_group_collectives(py::module_& module) {
  module.def(
      "record_group_collectives",
      [](std::vector<std::string> libraries) {
        set_library_folders(std::move(libraries));
        record_group_collectives(&find_call);
      },
      "Records every collective from now on. Files of the libraries begin with one of these folders.",
      py::arg("libraries"));
  py::class_<DeviceCollective, std::shared_ptr<DeviceCollective>>(
      module, "DeviceCollective", "A collective that a device runs: see [Note: waits of a device].")
      .def("wait_begins", &DeviceCollective::wait_begins, "The device's current stream is about to wait for it.")
      .def("wait_ends", &DeviceCollective::wait_ends, "And no longer waits.");
  module.def("take_device_collectives", &take_device_collectives,
             "Those that this thread has entered for a use since the last call, the oldest first.");
  module.def(
      "index_of_group", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) { return index_of_group(*group); },
      "This rank's number for the group.", py::arg("group"));
  module.def("forget_group", &forget_group, py::arg("index"));
  if (PyModule_AddFunctions(module.ptr(), plain_functions) != 0) throw py::error_already_set();
  module.attr("USES") = py::tuple(py::cast(std::vector<std::string>(kUses.begin(), kUses.end())));
  module.def("take_new_groups", &new_groups);
  module.def("take_new_calls", &take_new_calls, "Descriptions of type \"call\", as JSON.");
}

void bind_tensor_memory(py::module_& module) {
  see_tensor_memory();
  module.def("count_tensor_memory", &count_tensor_memory, "See csrc/observe/tensor_memory.h.", py::arg("on"));
  module.def("restart_tensor_memory_peak", &restart_tensor_memory_peak);
  module.def(
      "tensor_memory",
      [] {
        const TensorMemory use = tensor_memory();
        return py::make_tuple(use.bytes, use.peak);
      },
      "(bytes, peak)");
}

}  // namespace

void bind_inspection(ReducerClass& reducer) {
  reducer.def("inspect_gradients", &inspect_gradients)
      .def("inspect_averages", &inspect_averages)
      .def("request_inspection", &Reducer::request_inspection, py::arg("from_step"))
      .def("inspection_pending", &Reducer::inspection_pending)
      .def("set_inspection_callback", &set_inspection_callback<Reducer>, py::arg("callback"))
      .def("watch_gradients", &watch_gradients, py::arg("every"), py::arg("callback"));
}

void bind_observation(py::module_& module) {
  bind_group_collectives(module);
  bind_tensor_memory(module);
  module.def("open_collective_log", &open_collective_log, "See csrc/observe/collective_log.h.");
  module.def("close_collective_log", &close_collective_log);
  module.def("take_collectives", &collectives);
  module.def("checksum", &checksum_of, "64 bits of the tensor's bytes in logical order.", py::arg("tensor"), NoGil());
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
      .def("set_inspection_callback", &set_inspection_callback<Observation>, py::arg("callback"));
}

}  // namespace ddp_lab
