// The module `ddp_lab._C` and its recorder; the Python faces are in ddp_lab/parallel.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "record/black_box.h"
#include "record/recorder.h"
#include "reduce/device_spans.h"

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

// See [Note: plain functions].
PyObject* record(PyObject* /*module*/, PyObject* arguments, PyObject* keywords) {
  static const char* const names[] = {"kind",  "reducer",       "step",       "bucket",  "parameter",
                                      "bytes", "process_group", "generation", "host_ns", nullptr};
  std::uint8_t kind = 0;
  Event event;
  long long step = -1, bytes = -1, host_ns = 0;  // what CPython stores
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "b|iLiiLiHL:record", const_cast<char**>(names), &kind,
                                   &event.reducer, &step, &event.bucket, &event.parameter, &bytes, &event.process_group,
                                   &event.generation, &host_ns)) {
    return nullptr;
  }
  event.kind = static_cast<Kind>(kind);
  event.step = step;
  event.bytes = bytes;
  event.host_ns = host_ns;
  ddp_lab::recorder().record(event);
  Py_RETURN_NONE;
}

PyMethodDef plain_functions[] = {
    {"record", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&record)), METH_VARARGS | METH_KEYWORDS,
     "record($module, /, kind, reducer=-1, step=-1, bucket=-1, parameter=-1, bytes=-1, process_group=-1, "
     "generation=0, host_ns=0)\n--\n\nRecords one event."},
    {nullptr, nullptr, 0, nullptr}};

void record_activity(std::int32_t place, std::int64_t begin_ns) {
  Event event;
  event.kind = Kind::kActivity;
  event.parameter = place;
  event.device_begin_ns = begin_ns;
  ddp_lab::recorder().record(event);
}

void bind_recorder(py::module_& module) {
  module.attr("SCHEMA_VERSION") = ddp_lab::kSchemaVersion;
  module.def("now_ns", &ddp_lab::now_ns, "The time that events carry: CLOCK_MONOTONIC in nanoseconds.");
  if (PyModule_AddFunctions(module.ptr(), plain_functions) != 0) throw py::error_already_set();
  module.def("record_activity", &record_activity, "Records that the main thread was at a place until now.",
             py::arg("place"), py::arg("begin_ns"));
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
  module.def("leave", [](const std::string& text) { ddp_lab::leave(text); }, "A description.", py::arg("text"));
  module.def("leave_in", &ddp_lab::leave_in, "See csrc/record/black_box.h.", py::arg("file"));
  module.def(
      "measure_ns_per_event", [] { return ddp_lab::measure_ns_per_event(true); },
      "What one event costs on this machine, measured with a recorder of its own.",
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled core of ddp_lab.";
  bind_recorder(module);
  ddp_lab::bind_grad_bucket(module);
  ddp_lab::bind_reducer(module);
  ddp_lab::bind_observation(module);
  ddp_lab::bind_comm(module);
  ddp_lab::bind_module_watch(module);
}
