// Of the class `ddp_lab._C.Reducer`: torch's names, and what joining needs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "bindings/hooks.h"
#include "bindings/reducer.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

void install_futures(Reducer& reducer, const std::vector<py::object>& futures) {
  std::vector<FuturePointer> bare;
  for (const py::object& future : futures) bare.push_back(to_future(future));
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

}  // namespace

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

}  // namespace ddp_lab
