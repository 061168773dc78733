// Backends of ours for c10d; their Python faces are ddp_lab/comm/shared_memory.py and ddp_lab/comm/round_robin.py.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "comm/abortable_work.h"
#include "comm/flight_log.h"
#include "comm/round_robin.h"
#include "comm/shared_memory/backend.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace ddp_lab {

namespace {

using shared_memory::Group;
using shared_memory::Pool;
using shared_memory::PoolView;
using shared_memory::Segment;

// A view in Python's hands.
struct Readable {
  PoolView view;
};

c10::intrusive_ptr<c10d::Backend> make_backend(Segment& segment, const c10::intrusive_ptr<c10d::Backend>& gloo,
                                               int rank, const std::vector<int>& pids, const std::vector<int>& global,
                                               const std::vector<Readable>& pools, std::chrono::milliseconds timeout) {
  std::vector<PoolView> views;
  std::transform(pools.begin(), pools.end(), std::back_inserter(views), [](const Readable& pool) { return pool.view; });
  auto group =
      std::make_unique<Group>(std::make_shared<Segment>(std::move(segment)), rank, pids, global, std::move(views));
  return shared_memory::make_backend(std::move(group), gloo, timeout);
}

py::list frames_of(const torch::SymbolizedTracebacks& symbols, const std::vector<std::uint64_t>& traceback) {
  py::list frames;
  for (const std::uint64_t index : traceback) {
    const auto& frame = symbols.all_frames.at(index);
    frames.append(py::dict("filename"_a = frame.filename, "line"_a = frame.lineno, "name"_a = frame.funcname));
  }
  return frames;
}

// In the form of torch's own dump, of which it has what ddp_lab/diagnosis/collectives_in_flight.py reads.
py::dict dump_flights(bool with_frames) {
  const std::vector<Flight> flights = FlightLog::of_process().flights();
  torch::SymbolizedTracebacks symbols;
  if (with_frames) {
    std::vector<torch::CapturedTraceback*> captured;
    for (const Flight& flight : flights) {
      captured.push_back(flight.traceback.get());
    }
    symbols = torch::symbolize(captured);
  }
  py::list entries;
  for (std::size_t i = 0; i < flights.size(); ++i) {
    const Flight& flight = flights[i];
    std::vector<std::string> dtypes;
    std::transform(flight.dtypes.begin(), flight.dtypes.end(), std::back_inserter(dtypes),
                   [](at::ScalarType dtype) { return c10::toString(dtype); });
    const bool ended = flight.state == Flight::State::kEnded;
    const char* const state = ended ? "completed" : flight.state == Flight::State::kStarted ? "started" : "scheduled";
    py::dict entry("record_id"_a = flight.id, "process_group"_a = py::make_tuple(flight.group, ""),
                   "pg_id"_a = flight.made, "collective_seq_id"_a = flight.sequence, "profiling_name"_a = flight.title,
                   "input_sizes"_a = flight.shapes, "input_dtypes"_a = dtypes, "time_created_ns"_a = flight.created_ns,
                   "state"_a = state, "retired"_a = ended);
    if (with_frames) {
      entry["frames"] = frames_of(symbols, symbols.tracebacks.at(i));
    }
    entries.append(std::move(entry));
  }
  return py::dict("entries"_a = entries);
}

}  // namespace

void bind_comm(py::module_& module) {
  py::class_<Segment>(module, "Segment")
      .def_static("create", &Segment::create, py::arg("bytes"))
      .def_static(
          "attach", [](int pid, int descriptor, std::size_t bytes) { return Segment::attach(pid, descriptor, bytes); },
          py::arg("pid"), py::arg("descriptor"), py::arg("bytes"))
      .def_static("create_named", &Segment::create_named, py::arg("name"), py::arg("bytes"))
      .def_static("attach_named", &Segment::attach_named, py::arg("name"), py::arg("bytes"))
      .def_static("unlink", &Segment::unlink, py::arg("name"))
      .def(
          "hold", [](const Segment& segment, int rank) { shared_memory::Peers::hold(segment.descriptor(), rank); },
          py::arg("rank"))
      .def_property_readonly("descriptor", &Segment::descriptor)
      .def("close_descriptor", &Segment::close_descriptor);
  py::class_<Readable>(module, "Pool", "Memory of a rank that this process can read.")
      .def_static(
          "of_process",
          [](int pid, int descriptor, std::size_t bytes) { return Readable{Pool::of_process(pid, descriptor, bytes)}; },
          py::arg("pid"), py::arg("descriptor"), py::arg("bytes"))
      .def_static(
          "own",
          [] {
            const auto pool = Pool::own();
            return std::make_pair(pool->descriptor(), pool->bytes());
          },
          "This process's own pool: its descriptor and its size.");
  module.def("shared_memory_bytes", &Group::bytes_for, "Size in bytes of a group's segment.", py::arg("size"));
  module.def("shared_memory_backend", &make_backend, "The c10d backend; the segment is taken from its owner.",
             py::arg("segment"), py::arg("gloo"), py::arg("rank"), py::arg("pids"), py::arg("global"), py::arg("pools"),
             py::arg("timeout"));
  module.def("flights", &dump_flights,
             "The newest operations of our own backends, in the form of torch's Flight Recorder.", py::arg("frames"));
  module.def(
      "shared_memory_timeout",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return shared_memory::timeout_of(*backend); },
      "The timeout of such a backend; None for another.", py::arg("backend").none(false));
  module.def(
      "set_timeout",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, std::chrono::milliseconds timeout) {
        backend->setTimeout(timeout);
      },
      "Sets the timeout of any backend; Python's Backend has no such method.", py::arg("backend"), py::arg("timeout"));
  module.def(
      "shared_memory_broken",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return shared_memory::is_broken(*backend); },
      "Whether it is such a backend and unusable.", py::arg("backend").none(false));
  module.def("make_gloo_abortable", &make_gloo_abortable, "Makes Gloo's later `Work` handles abortable.");
  module.def(
      "count_gloo_works", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) { return count_gloo_works(*group); },
      "How many collectives of this group are in flight.", py::arg("group"), NoGil());
  module.def(
      "abort_gloo_works",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& why) {
        return abort_gloo_works(*group, why);
      },
      "Aborts them, and sends and receives; returns the number of collectives.", py::arg("group"), py::arg("why"),
      NoGil());
  module.def(
      "awaited_message",
      [](unsigned long thread) -> py::object {
        const std::optional<Message> found = awaited_message(thread);
        return found ? py::object(py::make_tuple(found->sends, found->peer, found->group)) : py::none();
      },
      "Of the send or receive on Gloo that a thread waits for: whether it sends, the peer's place in the group, the "
      "group's name.",
      py::arg("thread"));
  module.def("round_robin_backend", &make_round_robin, "The c10d backend that gives collectives to `groups` in turn.",
             py::arg("groups"));
}

}  // namespace ddp_lab
