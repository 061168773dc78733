// The class `ddp_lab._C.Reducer`.
#include "bindings/reducer.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/hooks.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

using ProcessGroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;
// [Note: who destroys the process group]
// A process group joins its threads when it is destroyed, and such a thread may be waiting for the GIL (a
// comm hook's future runs Python there). So whoever drops the last reference must not hold the GIL meanwhile.
GroupPointer hold(ProcessGroupPointer group) {
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

void register_python_hook(Reducer& reducer, py::object state, py::object hook) {
  auto made = make_python_hook(std::move(state), std::move(hook));
  const py::gil_scoped_release no_gil;
  reducer.set_comm_hook(std::move(made));
}

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                      const Reducer::Assignment& assignment, ProcessGroupPointer group,
                                      std::int32_t reducer_id, std::int32_t process_group_index,
                                      bool gradient_as_bucket_view, bool find_unused_parameters, bool static_graph,
                                      bool skip_all_reduce_unused_params, bool batched_grad_copy,
                                      bool lazy_bucket_allocation, std::vector<bool> expect_sparse,
                                      std::string module) {
  ReducerOptions options;
  options.names = std::move(names);
  options.gradient_as_bucket_view = gradient_as_bucket_view;
  options.find_unused_parameters = find_unused_parameters;
  options.static_graph = static_graph;
  options.skip_all_reduce_unused_params = skip_all_reduce_unused_params;
  options.batched_grad_copy = batched_grad_copy;
  options.lazy_bucket_allocation = lazy_bucket_allocation;
  options.expect_sparse = std::move(expect_sparse);
  options.module = std::move(module);
  return std::make_shared<Reducer>(std::move(parameters), assignment, hold(std::move(group)),
                                   EventOrigin{reducer_id, process_group_index}, std::move(options));
}

// (backward_begin, first_ready, ready, launched, reduced, backward_end) of each bucket, in ns.
py::list bucket_times(const Reducer& reducer) {
  std::vector<BucketReport> times;
  {
    const py::gil_scoped_release no_gil;
    times = reducer.times();
  }
  py::list list;
  for (const BucketReport& of : times) {
    list.append(py::make_tuple(of.backward_begin, of.first_ready, of.ready, of.launched, of.reduced, of.backward_end));
  }
  return list;
}

py::dict report(const Reducer& reducer) {
  Reducer::Report found;
  {
    const py::gil_scoped_release no_gil;
    found = reducer.report();
  }
  py::dict made;
  made["iteration"] = found.iteration;
  made["unused_parameter_size"] = found.unused_bytes;
  made["num_buckets_reduced"] = found.buckets_reduced;
  made["ready_order_last"] = found.ready_order;
  made["error"] = found.error;
  const StepTimes& times = found.times;
  made["forward_begin"] = times.forward_begin;
  made["forward_end"] = times.forward_end;
  made["backward_begin"] = times.backward_begin;
  made["backward_compute_end"] = times.backward_compute_end;
  made["communication_begin"] = times.communication_begin;
  made["communication_end"] = times.communication_end;
  return made;
}

}  // namespace

void bind_reducer(py::module_& module) {
  ReducerClass reducer(module, "Reducer", "See csrc/reduce/reducer.h.");
  reducer
      .def(py::init(&make_reducer), py::kw_only(), py::arg("parameters"), py::arg("names"), py::arg("assignment"),
           py::arg("process_group"), py::arg("reducer_id"), py::arg("process_group_index"),
           py::arg("gradient_as_bucket_view"), py::arg("find_unused_parameters") = false,
           py::arg("static_graph") = false, py::arg("skip_all_reduce_unused_params") = false,
           py::arg("batched_grad_copy") = false, py::arg("lazy_bucket_allocation") = false,
           py::arg("expect_sparse") = std::vector<bool>(), py::arg("module") = "")
      .def("begin_forward", &Reducer::begin_forward, NoGil(), py::arg("sync"))
      .def("end_forward", &Reducer::end_forward, NoGil())
      .def("arm", &arm, py::arg("outputs"), py::arg("sync") = true)
      .def("ready_order", &Reducer::ready_order, NoGil())
      .def("rebuild", &Reducer::rebuild, NoGil(), py::arg("assignment"))
      .def("abandon", &Reducer::abandon, NoGil())
      .def("check_ended", &Reducer::check_ended, NoGil())
      .def("in_flight", &Reducer::in_flight, NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def("register_hook", &register_python_hook, py::arg("state"), py::arg("hook"))
      .def("register_builtin_hook", &Reducer::set_builtin_hook, NoGil(), py::arg("kind"))
      .def(
          "update_process_group",
          [](Reducer& reducer, ProcessGroupPointer group, std::int32_t index, const Reducer::Assignment& assignment) {
            reducer.update_process_group(hold(std::move(group)), index, assignment);
          },
          NoGil(), py::arg("process_group"), py::arg("process_group_index"), py::arg("assignment"))
      .def("step", &Reducer::step, NoGil())
      .def("set_step", &Reducer::set_step, NoGil(), py::arg("step"))
      .def("generation", &Reducer::generation, NoGil())
      .def("set_generation", &Reducer::set_generation, NoGil(), py::arg("generation"))
      .def("sums_pieces", &Reducer::sums_pieces)
      .def("set_static_graph", &Reducer::set_static_graph, NoGil())
      .def("report", &report)
      .def("set_error", &Reducer::set_error, NoGil(), py::arg("text"))
      .def("bucket_times", &bucket_times);
  module.def("learn_references", &learn_references, "See [Note: reduced in place] in csrc/reduce/in_place.cpp.",
             py::arg("leaf"));
  bind_torch_names(reducer);
  bind_joining(reducer);
  bind_inspection(reducer);
  bind_live(reducer);
}

}  // namespace ddp_lab
