// The class `ddp_lab._C.Reducer`.
#include "bindings/reducer.h"

#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/hooks.h"
#include "reduce/warnings.h"

namespace py = pybind11;
using namespace pybind11::literals;

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
  py::list list;
  for (const BucketReport& of : without_gil([&] { return reducer.times(); })) {
    list.append(py::make_tuple(of.backward_begin, of.first_ready, of.ready, of.launched, of.reduced, of.backward_end));
  }
  return list;
}

py::dict report(const Reducer& reducer) {
  const Reducer::Report found = without_gil([&] { return reducer.report(); });
  const StepTimes& times = found.times;
  return py::dict("iteration"_a = found.iteration, "unused_parameter_size"_a = found.unused_bytes,
                  "num_buckets_reduced"_a = found.buckets_reduced, "ready_order_last"_a = found.ready_order,
                  "error"_a = found.error, "forward_begin"_a = times.forward_begin, "forward_end"_a = times.forward_end,
                  "backward_begin"_a = times.backward_begin, "backward_compute_end"_a = times.backward_compute_end,
                  "communication_begin"_a = times.communication_begin, "communication_end"_a = times.communication_end);
}

// Arms the reducer; warnings become Python's.
void arm(Reducer& reducer, const std::vector<at::Tensor>& outputs, bool sync) {
  torch::PyWarningHandler warnings;
  try {
    const py::gil_scoped_release no_gil;
    reducer.arm(outputs, sync);
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
}

void install_futures(Reducer& reducer, const std::vector<py::object>& futures) {
  std::vector<FuturePointer> bare;
  for (const py::object& future : futures) bare.push_back(to_future(future));
  const py::gil_scoped_release no_gil;
  reducer.install_post_backward_futures(std::move(bare));
}

py::object run_comm_hook(Reducer& reducer, const GradBucket& bucket) {
  return to_python(without_gil([&] { return reducer.run_comm_hook(copy_of(bucket)); }));
}

py::object run_all_reduce(Reducer& reducer, c10d::GradBucket& bucket) {
  return to_python(without_gil([&] { return reducer.run_all_reduce(bucket); }));
}

// Lets a signal end a pause on the main thread; on others there are none.
void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// The end of a backward on a thread of torch's has no line of the program: torch repeats the warning where it returns.
void warn_at_users_line(const std::string& text) {
  const py::gil_scoped_acquire gil;
  if (PyEval_GetFrame() == nullptr) {
    TORCH_WARN(text);
  } else {
    py::module_::import("ddp_lab.parallel.core.arguments").attr("warn_user")(text);
  }
}

void set_breakpoints(Reducer& reducer, const Breakpoints::Points& points, std::vector<std::size_t> parameters,
                     std::vector<std::size_t> buckets) {
  reducer.set_pause_check(check_signals);
  reducer.breakpoints().set(points, std::move(parameters), std::move(buckets));
}

// "pause" is (point, index, step, since in ns) or None.
py::dict stage(const Reducer& reducer) {
  const Reducer::Stage found = without_gil([&] { return reducer.stage(); });
  py::list buckets;
  for (const BucketReport& of : found.buckets) {
    buckets.append(py::make_tuple(of.first_ready, of.ready, of.launched, of.reduced));
  }
  py::object pause = py::none();
  if (found.pause) {
    pause = py::make_tuple(static_cast<int>(found.pause->point), found.pause->index, found.pause->step,
                           found.pause->since_ns);
  }
  return py::dict("step"_a = found.step, "generation"_a = found.generation, "in_flight"_a = found.in_flight,
                  "finalizing"_a = found.finalizing, "buckets"_a = buckets, "missing"_a = found.missing,
                  "pause"_a = pause);
}

// What libraries call on `model.reducer`, by torch's names.
void bind_torch_names(ReducerClass& reducer) {
  reducer
      .def(
          "prepare_for_backward",
          [](Reducer& self, const std::vector<at::Tensor>& outputs) { arm(self, outputs, true); }, py::arg("outputs"))
      .def(
          "prepare_for_backward", [](Reducer& self, const at::Tensor& output) { arm(self, {output}, true); },
          py::arg("output"))
      // Lightning's manual optimization calls these around a backward. Forwards rebuild here, and a static graph's
      // first backward ends by itself.
      .def("_rebuild_buckets", [](const Reducer&) { return false; })
      .def("_delay_all_reduce", [](const Reducer&) {})
      .def("_get_local_used_map", &Reducer::used_map, NoGil())
      .def("_ddp_graph_static", &Reducer::graph_was_static, NoGil())
      .def(
          "_set_mixed_precision_param_dtype",
          [](Reducer& self, const py::object& dtype) {
            self.set_gradient_dtype(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
          },
          py::arg("dtype"))
      .def("_set_optimizer_in_backward", &Reducer::set_optimizer_in_backward, NoGil(),
           py::arg("parameters") = std::vector<std::size_t>())
      .def("_set_sparse_metadata", &Reducer::set_sparse_metadata, NoGil(), py::arg("metadata"))
      .def("_set_manual_finalization_required", &Reducer::require_manual_end, NoGil(), py::arg("required"))
      .def("_should_finalize_after_backward", &Reducer::ends_after_backward, NoGil())
      .def("_finalize_backward_manual", &Reducer::end_manually, NoGil())
      .def(
          "_autograd_hook", [](Reducer& reducer, std::size_t index) { reducer.on_grad_ready(index); }, NoGil(),
          py::arg("index"))
      .def("_run_comm_hook", &run_comm_hook, py::arg("bucket"))
      .def("_run_allreduce_hook", &run_all_reduce, py::arg("bucket"));
}

// For inputs that are uneven between ranks, for no_sync, and for work of the forward pass.
void bind_joining(ReducerClass& reducer) {
  reducer.def("rebuild_due", &Reducer::rebuild_due, NoGil())
      .def("synchronize", &Reducer::synchronize, NoGil())
      .def("shadow_backward", &Reducer::shadow_backward, NoGil())
      .def("mark_all_ready", &Reducer::mark_all_ready, NoGil())
      .def("set_forward_pass_work", &Reducer::set_forward_pass_work, NoGil(), py::arg("work"),
           py::arg("divide_by_initial_world_size"))
      .def("install_post_backward_futures", &install_futures, py::arg("futures"))
      .def("set_no_sync", &Reducer::set_no_sync, NoGil(), py::arg("inside"))
      .def("take_no_sync_warning", &Reducer::take_no_sync_warning, NoGil());
}

// For pauses, injected faults and live changes.
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

}  // namespace

void bind_reducer(py::module_& module) {
  warn_at_line = &warn_at_users_line;
  ReducerClass reducer(module, "Reducer", "See csrc/reduce/reducer.h.");
  reducer
      .def(py::init(&make_reducer), py::kw_only(), py::arg("parameters"), py::arg("names"), py::arg("assignment"),
           py::arg("process_group"), py::arg("reducer_id"), py::arg("process_group_index"),
           py::arg("gradient_as_bucket_view"), py::arg("find_unused_parameters") = false,
           py::arg("static_graph") = false, py::arg("skip_all_reduce_unused_params") = false,
           py::arg("batched_grad_copy") = false, py::arg("lazy_bucket_allocation") = false,
           py::arg("expect_sparse") = std::vector<bool>(), py::arg("module") = "")
      .def("follow_accumulators", &Reducer::follow_accumulators, NoGil())
      .def("begin_forward", &Reducer::begin_forward, NoGil(), py::arg("sync"))
      .def("end_forward", &Reducer::end_forward, NoGil())
      .def("arm", &arm, py::arg("outputs"), py::arg("sync") = true)
      .def("ready_order", &Reducer::ready_order, NoGil())
      .def("rebuild", &Reducer::rebuild, NoGil(), py::arg("assignment"))
      .def("abandon", &Reducer::abandon, NoGil())
      .def("check_ended", &Reducer::check_ended, NoGil())
      .def("in_flight", &Reducer::in_flight, NoGil())
      .def("in_doubt", &Reducer::in_doubt, NoGil())
      .def("unaveraged", &Reducer::unaveraged, NoGil())
      .def("forget_unaveraged", &Reducer::forget_unaveraged, NoGil())
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
