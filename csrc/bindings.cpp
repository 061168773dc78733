// Every pybind11 line of `ddp_lab._C`; the Python faces are in ddp_lab/parallel.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hook_bindings.h"
#include "record/cost.h"
#include "record/recorder.h"
#include "reduce/device_spans.h"
#include "reduce/reducer.h"

namespace py = pybind11;

namespace {

using ddp_lab::Event;
using ddp_lab::Kind;
using ddp_lab::Recorder;

// (events as bytes without a copy, dropped, next)
py::tuple drain(std::uint64_t cursor) {
  auto batch = std::make_unique<Recorder::Batch>();
  {
    const py::gil_scoped_release no_gil;
    ddp_lab::DeviceSpans::resolve_all();
    *batch = ddp_lab::recorder().drain(cursor);
  }
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(batch->events.data());
  const auto size = static_cast<py::ssize_t>(batch->events.size() * sizeof(Event));
  const std::uint64_t dropped = batch->dropped;
  const std::uint64_t next = batch->next;
  const py::capsule owner(batch.release(), [](void* owned) { delete static_cast<Recorder::Batch*>(owned); });
  return py::make_tuple(py::array_t<std::uint8_t>(size, bytes, owner), dropped, next);
}

void record(std::uint8_t kind, std::int32_t reducer, std::int64_t step, std::int32_t bucket, std::int32_t parameter,
            std::int64_t bytes, std::int32_t process_group, std::uint16_t generation) {
  Event event;
  event.kind = static_cast<Kind>(kind);
  event.reducer = reducer;
  event.step = step;
  event.bucket = bucket;
  event.parameter = parameter;
  event.bytes = bytes;
  event.process_group = process_group;
  event.generation = generation;
  ddp_lab::recorder().record(event);
}

void bind_recorder(py::module_& module) {
  module.attr("SCHEMA_VERSION") = ddp_lab::kSchemaVersion;
  module.def("now_ns", &ddp_lab::now_ns, "The time that events carry: CLOCK_MONOTONIC in nanoseconds.");
  module.def("record", &record, "Records one event.", py::arg("kind"), py::arg("reducer") = -1, py::arg("step") = -1,
             py::arg("bucket") = -1, py::arg("parameter") = -1, py::arg("bytes") = -1, py::arg("process_group") = -1,
             py::arg("generation") = 0);
  module.def("drain", &drain, "(events as an array of bytes, dropped, next cursor).", py::arg("cursor"));
  module.def("recorder_enable", [](bool on) { ddp_lab::recorder().enable(on); }, py::arg("on"));
  module.def("recorder_enabled", [] { return ddp_lab::recorder().enabled(); });
  module.def(
      "recorder_statistics",
      [] {
        const Recorder::Statistics now = ddp_lab::recorder().statistics();
        return py::make_tuple(now.recorded, now.dropped, now.capacity, now.enabled);
      },
      "(recorded, dropped, capacity, enabled)");
  module.def(
      "measure_ns_per_event", [] { return ddp_lab::measure_ns_per_event(true); },
      "What one event costs on this machine, measured with a recorder of its own.",
      py::call_guard<py::gil_scoped_release>());
}

using ddp_lab::Inspection;
using ddp_lab::Reducer;
using ProcessGroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;
using NoGil = py::call_guard<py::gil_scoped_release>;

// [Note: who destroys the process group]
// A process group joins its threads when it is destroyed, and such a thread may be waiting for the GIL (a
// comm hook's future runs Python there). So whoever drops the last reference must not hold the GIL meanwhile.
ddp_lab::GroupPointer hold(ProcessGroupPointer group) {
  c10d::ProcessGroup* const raw = group.get();
  return {raw, [group = std::move(group)](c10d::ProcessGroup*) mutable {
            if (Py_IsInitialized() && PyGILState_Check()) {
              const py::gil_scoped_release no_gil;
              group.reset();
            } else {
              group.reset();
            }
          }};
}

// A Python object that C++ may drop without the GIL.
std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

py::list to_list(const Reducer::Inspections& inspections) {
  py::list list;
  for (const Inspection& found : inspections) list.append(py::make_tuple(found.norm, found.checksum));
  return list;
}

// [(norm, checksum)] of each bucket, or None while the gradients are changing.
py::object inspect(const Reducer& reducer, bool anyway) {
  const auto gradients = reducer.gradients_to_inspect(anyway);
  if (!gradients) return py::none();
  Reducer::Inspections found;
  {
    const py::gil_scoped_release no_gil;
    for (const auto& bucket : *gradients) found.push_back(ddp_lab::inspect(bucket));
  }
  return to_list(found);
}

void set_inspection_callback(Reducer& reducer, py::object callback) {
  auto held = hold(std::move(callback));
  const auto call = [held](std::int64_t step, const Reducer::Inspections& found) {
    const py::gil_scoped_acquire gil;
    (*held)(step, to_list(found));
  };
  const py::gil_scoped_release no_gil;
  reducer.set_inspection_callback(call);
}

void register_python_hook(Reducer& reducer, py::object state, py::object hook) {
  auto made = ddp_lab::make_python_hook(std::move(state), std::move(hook));
  const py::gil_scoped_release no_gil;
  reducer.set_comm_hook(std::move(made));
}

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                      const Reducer::Assignment& assignment, ProcessGroupPointer group,
                                      std::int32_t reducer_id, std::int32_t process_group_index,
                                      bool gradient_as_bucket_view) {
  ddp_lab::ReducerOptions options;
  options.names = std::move(names);
  options.reducer_id = reducer_id;
  options.process_group_index = process_group_index;
  options.gradient_as_bucket_view = gradient_as_bucket_view;
  return std::make_shared<Reducer>(std::move(parameters), assignment, hold(std::move(group)), std::move(options));
}

// (backward_begin, first_ready, ready, launched, reduced, backward_end) of each bucket, in ns.
py::list bucket_times(const Reducer& reducer) {
  std::vector<Reducer::Times> times;
  {
    const py::gil_scoped_release no_gil;
    times = reducer.times();
  }
  py::list list;
  for (const Reducer::Times& of : times) {
    list.append(py::make_tuple(of.backward_begin, of.first_ready, of.ready, of.launched, of.reduced, of.backward_end));
  }
  return list;
}

void bind_reducer(py::module_& module) {
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer", "See csrc/reduce/reducer.h.")
      .def(py::init(&make_reducer), py::kw_only(), py::arg("parameters"), py::arg("names"), py::arg("assignment"),
           py::arg("process_group"), py::arg("reducer_id"), py::arg("process_group_index"),
           py::arg("gradient_as_bucket_view"))
      .def("begin_forward", &Reducer::begin_forward, NoGil(), py::arg("sync"))
      .def("end_forward", &Reducer::end_forward, NoGil())
      .def("arm", &Reducer::arm, NoGil(), py::arg("outputs"))
      .def("ready_order", &Reducer::ready_order, NoGil())
      .def("rebuild", &Reducer::rebuild, NoGil(), py::arg("assignment"))
      .def("abandon", &Reducer::abandon, NoGil())
      .def("in_flight", &Reducer::in_flight, NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def("register_hook", &register_python_hook, py::arg("state"), py::arg("hook"))
      .def(
          "update_process_group",
          [](Reducer& reducer, ProcessGroupPointer group, std::int32_t index, const Reducer::Assignment& assignment) {
            reducer.update_process_group(hold(std::move(group)), index, assignment);
          },
          NoGil(), py::arg("process_group"), py::arg("process_group_index"), py::arg("assignment"))
      .def("step", &Reducer::step, NoGil())
      .def("set_step", &Reducer::set_step, NoGil(), py::arg("step"))
      .def("generation", &Reducer::generation, NoGil())
      .def("bucket_times", &bucket_times)
      .def("inspect", &inspect, py::arg("anyway"))
      .def("request_inspection", &Reducer::request_inspection, py::arg("from_step"))
      .def("inspection_pending", &Reducer::inspection_pending)
      .def("set_inspection_callback", &set_inspection_callback, py::arg("callback"));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled core of ddp_lab.";
  bind_recorder(module);
  ddp_lab::bind_grad_bucket(module);
  bind_reducer(module);
}
