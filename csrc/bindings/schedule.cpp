// Every pybind11 line of `ddp_lab._schedule`: the bucket schedule and its replay, for processes without torch
// (simulator, tests).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <numeric>
#include <utility>
#include <vector>

#include "reduce/bucket_schedule.h"
#include "reduce/replay.h"

namespace py = pybind11;

using ddp_lab::BucketSchedule;
using ddp_lab::Contention;
using ddp_lab::Costs;
using ddp_lab::Replay;
using ddp_lab::Replayed;

namespace {

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;
using Integers = py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>;

void raise_schedule_error(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const ddp_lab::BucketStateError& error) {
    const py::object type = py::module_::import("ddp_lab.errors").attr("BucketStateError");
    py::set_error(type, error.what());
  }
}

std::vector<std::size_t> mark_ready(BucketSchedule& schedule, std::size_t parameter) {
  const BucketSchedule::Range range = schedule.mark_ready(parameter);
  std::vector<std::size_t> buckets(range.end - range.begin);
  std::iota(buckets.begin(), buckets.end(), range.begin);
  return buckets;
}

// The replay would never end with times that are none.
void check_times(std::initializer_list<const Doubles*> arrays) {
  for (const Doubles* values : arrays) {
    const bool fine = std::all_of(values->data(), values->data() + values->size(),
                                  [](double v) { return std::isfinite(v) && v >= 0; });
    if (!fine) throw py::value_error("times and slowdowns must be finite and at least 0");
  }
}

std::vector<double> doubles(const Doubles& values) { return {values.data(), values.data() + values.size()}; }

Replay make_replay(const Doubles& ready, const Doubles& begin, const Doubles& computed) {
  const bool fits = ready.ndim() == 2 && ready.shape(0) > 0 && ready.shape(1) > 0 && begin.ndim() == 1 &&
                    computed.ndim() == 1 && begin.shape(0) == ready.shape(0) && computed.shape(0) == ready.shape(0);
  if (!fits) throw py::value_error("ready must have shape [ranks, parameters], begin and computed [ranks]");
  check_times({&ready, &begin, &computed});
  std::vector<std::vector<double>> rows;
  for (py::ssize_t r = 0; r < ready.shape(0); ++r)
    rows.emplace_back(ready.data(r, 0), ready.data(r, 0) + ready.shape(1));
  return Replay({std::move(rows), doubles(begin), doubles(computed)});
}

// The first `count` of a row.
std::vector<double> row(const Doubles& values, py::ssize_t index, std::size_t count) {
  return {values.data(index, 0), values.data(index, 0) + count};
}

// Copies `values` to `target` and fills the row up with zeros.
void write_row(const std::vector<double>& values, double* target, py::ssize_t length) {
  std::fill(std::copy(values.begin(), values.end(), target), target + length, 0);
}

// One configuration after the other; each result lies where its configuration stands.
py::tuple run_replays(const Replay& replay, const Integers& bucket_of, const Doubles& launch, const Doubles& latency,
                      const Doubles& transfer, const Doubles& write_back, const Doubles& contention) {
  const auto ranks = static_cast<py::ssize_t>(replay.ranks()),
             parameters = static_cast<py::ssize_t>(replay.parameters());
  if (bucket_of.ndim() != 2 || bucket_of.shape(1) != parameters)
    throw py::value_error("bucket_of must have shape [configurations, parameters]");
  const py::ssize_t count = bucket_of.shape(0);
  for (const Doubles* one : {&launch, &latency, &transfer, &write_back}) {
    if (one->ndim() != 2 || one->shape(0) != count || one->shape(1) != launch.shape(1))
      throw py::value_error("costs must have shape [configurations, buckets]");
  }
  if (contention.ndim() != 2 || contention.shape(0) != count || contention.shape(1) != 4)
    throw py::value_error("contention must have shape [configurations, 4]");
  check_times({&launch, &latency, &transfer, &write_back, &contention});
  const py::ssize_t most = launch.shape(1);
  py::array_t<double> launched({count, ranks, most}), begun({count, most}), reduced({count, most});
  py::array_t<double> computed({count, ranks}), end({count, ranks});
  for (py::ssize_t i = 0; i < count; ++i) {
    const std::vector<std::int32_t> of(bucket_of.data(i, 0), bucket_of.data(i, 0) + parameters);
    const auto buckets = static_cast<std::size_t>(std::max(-1, *std::max_element(of.begin(), of.end())) + 1);
    if (buckets > static_cast<std::size_t>(most)) throw py::value_error("bucket_of names a bucket without costs");
    const Costs costs{row(launch, i, buckets), row(latency, i, buckets), row(transfer, i, buckets),
                      row(write_back, i, buckets)};
    const double* of_link = contention.data(i, 0);
    const Contention link{of_link[0], of_link[1], of_link[2], static_cast<std::size_t>(std::max(1.0, of_link[3]))};
    const Replayed found = replay.run(of, costs, link);
    for (py::ssize_t r = 0; r < ranks; ++r)
      write_row(found.launched[static_cast<std::size_t>(r)], launched.mutable_data(i, r, 0), most);
    write_row(found.begun, begun.mutable_data(i, 0), most);
    write_row(found.reduced, reduced.mutable_data(i, 0), most);
    write_row(found.computed, computed.mutable_data(i, 0), ranks);
    write_row(found.end, end.mutable_data(i, 0), ranks);
  }
  return py::make_tuple(launched, begun, reduced, computed, end);
}

}  // namespace

PYBIND11_MODULE(_schedule, module) {
  module.doc() = "The order in which the buckets of one backward are launched; needs no torch.";
  py::register_local_exception_translator(&raise_schedule_error);
  py::class_<BucketSchedule>(module, "BucketSchedule",
                             "pending -> ready -> launched -> reduced, launched strictly in bucket order.\n\n"
                             "Raises ddp_lab.BucketStateError, naming parameter and bucket, for any other transition.")
      .def(py::init<const std::vector<std::vector<std::size_t>>&>(), py::arg("parameters_per_bucket"))
      .def("arm", &BucketSchedule::arm, "Begins a backward: every bucket pending.")
      .def("mark_ready", &mark_ready, "Buckets to launch now, in this order.", py::arg("parameter"))
      .def("mark_reduced", &BucketSchedule::mark_reduced, "The bucket's collective has completed.", py::arg("bucket"))
      .def(
          "state", [](const BucketSchedule& schedule, std::size_t bucket) { return to_string(schedule.state(bucket)); },
          "'pending', 'ready', 'launched' or 'reduced'.", py::arg("bucket"))
      .def("bucket_of", &BucketSchedule::bucket_of, "The bucket of a parameter.", py::arg("parameter"))
      .def("missing", &BucketSchedule::missing, "Parameters whose gradient has not arrived, in bucket order.")
      .def_property_readonly("launched", &BucketSchedule::launched, "Buckets 0 .. launched - 1 have been launched.")
      .def_property_readonly("finished", &BucketSchedule::finished, "Whether every bucket is reduced.")
      .def("__len__", &BucketSchedule::size);
  py::class_<Replay>(module, "Replay",
                     "Replays one recorded backward with other buckets and links, see csrc/reduce/replay.h.")
      .def(py::init(&make_replay), py::arg("ready"), py::arg("begin"), py::arg("computed"),
           "ready: ns since the begin of the rank's backward, [ranks, parameters]; begin: of the backward, ns since "
           "the\n"
           "step's, [ranks]; computed: end of the rank's computation, ns since the begin of its backward, [ranks].")
      .def(
          "run", &run_replays, py::arg("bucket_of"), py::arg("launch"), py::arg("latency"), py::arg("transfer"),
          py::arg("write_back"), py::arg("contention"),
          "bucket_of: int32 [configurations, parameters], -1 in no bucket; launch, latency, transfer, write_back: ns,\n"
          "[configurations, buckets]; contention: [configurations, 4] compute_slowdown, comm_slowdown, sharing, "
          "lanes.\n"
          "Returns launched [configurations, ranks, buckets], begun and reduced [configurations, buckets], computed\n"
          "and end [configurations, ranks], ns since the step's begin.");
}
