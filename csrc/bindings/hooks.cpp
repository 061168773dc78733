// Comm hooks in Python, and the bucket that they are given.
#include "bindings/hooks.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <pybind11/stl.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace py = pybind11;

// Of <torch/csrc/jit/python/pybind_utils.h>, whose templates take a compiler ten seconds.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type, std::optional<std::int32_t> count);
TORCH_PYTHON_API py::object toPyObject(c10::IValue value);
}  // namespace torch::jit

namespace ddp_lab {
namespace {

std::string type_name(const py::handle& object) {
  const py::handle type = py::type::handle_of(object);
  return py::str(type.attr("__module__")).cast<std::string>() + "." +
         py::str(type.attr("__qualname__")).cast<std::string>();
}

// Partial functions and callable objects have no name of their own.
std::string hook_name(const py::object& hook) {
  if (py::hasattr(hook, "__qualname__")) return py::str(hook.attr("__qualname__")).cast<std::string>();
  return py::str(py::type::handle_of(hook).attr("__qualname__")).cast<std::string>();
}

class PythonHook final : public CommHook {
 public:
  PythonHook(py::object state, py::object hook)
      : CommHook(hook_name(hook)), state_(std::move(state)), hook_(std::move(hook)) {}

  ~PythonHook() override {
    const py::gil_scoped_acquire gil;
    state_ = py::object();
    hook_ = py::object();
  }

  FuturePointer run(std::unique_ptr<GradBucket> bucket) override {
    const py::gil_scoped_acquire gil;
    const py::object returned = hook_(state_, std::shared_ptr<GradBucket>(std::move(bucket)));
    if (!py::isinstance(returned, py::module_::import("torch._C").attr("Future"))) {
      throw std::runtime_error("DDP communication hook's callback must return a torch.futures.Future object, but got " +
                               type_name(returned) + " from '" + name() + "'");
    }
    return to_future(returned);
  }

  at::Tensor result(const c10::IValue& value) const override {
    if (!value.isPyObject()) return CommHook::result(value);
    const py::gil_scoped_acquire gil;
    const py::object object = torch::jit::toPyObject(value);
    if (!THPVariable_Check(object.ptr())) {
      throw std::runtime_error("Unable to cast what the future of the comm hook '" + name() +
                               "' holds to Tensor: it must hold one tensor, but holds " + type_name(object));
    }
    return THPVariable_Unpack(object.ptr());
  }

  bool reads_gradients() const override { return true; }

 private:
  py::object state_;
  py::object hook_;
};

// A bucket of its own, that no reducer has: to try a hook on it.
std::shared_ptr<GradBucket> make_bucket(std::size_t index, std::size_t count, std::vector<at::Tensor> gradients) {
  std::vector<std::size_t> indices(gradients.size());
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  Bucket bucket(indices, gradients);
  for (std::size_t slot = 0; slot < gradients.size(); ++slot) bucket.copy_in(slot, gradients[slot], 1, false);
  return std::make_shared<GradBucket>(bucket, index, count);
}

}  // namespace

// Adds the class GradBucket, derived from torch.distributed.GradBucket.
void bind_grad_bucket(py::module_& module) {
  py::module_::import("torch.distributed");  // has the base class
  py::class_<GradBucket, c10d::GradBucket, std::shared_ptr<GradBucket>>(module, "GradBucket",
                                                                        "See csrc/reduce/comm_hook.h.")
      .def("gradients", &GradBucket::gradients, NoGil(),
           "One tensor for each parameter, of its shape: a view of the buffer.");
  module.def("make_bucket", &make_bucket, "A GradBucket that holds these gradients.", py::arg("index"),
             py::arg("count"), py::arg("gradients"), NoGil());
}

HookPointer make_python_hook(py::object state, py::object hook) {
  return std::make_unique<PythonHook>(std::move(state), std::move(hook));
}

std::unique_ptr<GradBucket> copy_of(const GradBucket& bucket) { return std::make_unique<GradBucket>(bucket); }

py::object to_python(FuturePointer future) { return torch::jit::toPyObject(c10::IValue(std::move(future))); }

FuturePointer to_future(const py::object& future) {
  return torch::jit::toIValue(future, c10::FutureType::create(c10::AnyType::get()), std::nullopt).toFuture();
}

}  // namespace ddp_lab
