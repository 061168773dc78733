// Every pybind11 line of `ddp_lab._schedule`: the bucket schedule for processes without torch (simulator,
// tests).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <exception>
#include <numeric>
#include <vector>

#include "reduce/bucket_schedule.h"

namespace py = pybind11;

using ddp_lab::BucketSchedule;

namespace {

void raise_schedule_error(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const ddp_lab::ScheduleError& error) {
    const py::object type = py::module_::import("ddp_lab.errors").attr("ScheduleError");
    py::set_error(type, error.what());
  }
}

std::vector<std::size_t> mark_ready(BucketSchedule& schedule, std::size_t parameter) {
  const BucketSchedule::Range range = schedule.mark_ready(parameter);
  std::vector<std::size_t> buckets(range.end - range.begin);
  std::iota(buckets.begin(), buckets.end(), range.begin);
  return buckets;
}

}  // namespace

PYBIND11_MODULE(_schedule, module) {
  module.doc() = "The order in which the buckets of one backward are launched; needs no torch.";
  py::register_local_exception_translator(&raise_schedule_error);
  py::class_<BucketSchedule>(module, "BucketSchedule",
                             "pending -> ready -> launched -> reduced, launched strictly in bucket order.\n\n"
                             "Raises ddp_lab.ScheduleError, naming parameter and bucket, for any other transition.")
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
}
