// The class `ddp_lab._C.Reducer`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "hook_bindings.h"
#include "live_bindings.h"
#include "reduce/reducer.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

using ProcessGroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;
using NoGil = py::call_guard<py::gil_scoped_release>;

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

// [(norm, checksum)] of each bucket, or None during a backward. The thread that trains alone.
py::object inspect_gradients(const Reducer& reducer) {
  std::optional<Reducer::Inspections> found;
  {
    const py::gil_scoped_release no_gil;
    found = reducer.inspect_gradients();
  }
  return found ? py::object(to_list(*found)) : py::none();
}

// (step, [(norm, checksum)]) of what the last backward has averaged, or None. Any thread.
py::object inspect_averages(const Reducer& reducer) {
  std::optional<Reducer::Inspected> found;
  if (std::optional<Reducer::Averages> averages = reducer.averages()) {
    const py::gil_scoped_release no_gil;
    found = reducer.inspect(*averages);
    averages.reset();
  }
  return found ? py::object(py::make_tuple(found->step, to_list(found->buckets))) : py::none();
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
  options.reducer_id = reducer_id;
  options.process_group_index = process_group_index;
  options.gradient_as_bucket_view = gradient_as_bucket_view;
  options.find_unused_parameters = find_unused_parameters;
  options.static_graph = static_graph;
  options.skip_all_reduce_unused_params = skip_all_reduce_unused_params;
  options.batched_grad_copy = batched_grad_copy;
  options.lazy_bucket_allocation = lazy_bucket_allocation;
  options.expect_sparse = std::move(expect_sparse);
  options.module = std::move(module);
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

// Warnings become Python's.
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

using PythonFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;

void install_futures(Reducer& reducer, const std::vector<PythonFuture>& futures) {
  std::vector<FuturePointer> bare;
  for (const PythonFuture& future : futures) bare.push_back(future->fut);
  const py::gil_scoped_release no_gil;
  reducer.install_post_backward_futures(std::move(bare));
}

py::object run_comm_hook(Reducer& reducer, const GradBucket& bucket) {
  FuturePointer future;
  {
    const py::gil_scoped_release no_gil;
    future = reducer.run_comm_hook(copy_of(bucket));
  }
  return to_python(std::move(future));
}

py::object run_all_reduce(Reducer& reducer, c10d::GradBucket& bucket) {
  FuturePointer future;
  {
    const py::gil_scoped_release no_gil;
    future = reducer.run_all_reduce(bucket);
  }
  return to_python(std::move(future));
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
  const Reducer::StepTimes& times = found.times;
  made["forward_begin"] = times.forward_begin;
  made["forward_end"] = times.forward_end;
  made["backward_begin"] = times.backward_begin;
  made["backward_compute_end"] = times.backward_compute_end;
  made["communication_begin"] = times.communication_begin;
  made["communication_end"] = times.communication_end;
  return made;
}

using ReducerClass = py::class_<Reducer, std::shared_ptr<Reducer>>;

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
      .def("bucket_times", &bucket_times)
      .def("inspect_gradients", &inspect_gradients)
      .def("inspect_averages", &inspect_averages)
      .def("request_inspection", &Reducer::request_inspection, py::arg("from_step"))
      .def("inspection_pending", &Reducer::inspection_pending)
      .def("set_inspection_callback", &set_inspection_callback, py::arg("callback"))
      .def("watch_gradients", &watch_gradients, py::arg("every"), py::arg("callback"));
  module.def("learn_references", &learn_references, "See [Note: reduced in place] in csrc/reduce/in_place.cpp.",
             py::arg("leaf"));
  bind_torch_names(reducer);
  bind_joining(reducer);
  bind_live(reducer);
}

}  // namespace ddp_lab
