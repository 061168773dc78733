// The module `ddp_lab._C` and its recorder; the Python faces are in ddp_lab/parallel.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
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

void record(std::uint8_t kind, std::int32_t reducer, std::int64_t step, std::int32_t bucket, std::int32_t parameter,
            std::int64_t bytes, std::int32_t process_group, std::uint16_t generation, std::int64_t host_ns) {
  Event event;
  event.host_ns = host_ns;
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
  module.def("record", &record, "Records one event.", py::arg("kind"), py::arg("reducer") = -1, py::arg("step") = -1,
             py::arg("bucket") = -1, py::arg("parameter") = -1, py::arg("bytes") = -1, py::arg("process_group") = -1,
             py::arg("generation") = 0, py::arg("host_ns") = 0);
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
