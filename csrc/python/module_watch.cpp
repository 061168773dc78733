#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace ddp_lab {
namespace {

// [Note: watching a module]
// A module keeps its parameters, buffers and children in three dicts. Python writes down once what they hold; each
// forward compares pointers, a few nanoseconds for an entry. The pointers here are borrowed: whoever makes a watch
// keeps what it was made from, so that Python's garbage collector sees all of it. A difference only means that Python
// has to look: it may be one that does not matter, like a key that was deleted and set again.

class ModuleWatch {
 public:
  // An entry of `seen` is (kind, dict, (key, value, trained, ...)), where `kind` is "p" (parameters), "b" (buffers:
  // only their names count) or "m" (child modules).
  explicit ModuleWatch(const py::tuple& seen) {
    for (const py::handle entry : seen) {
      const auto [kind, dict, held] = entry.cast<std::tuple<std::string, py::handle, py::tuple>>();
      dicts_.push_back({dict.ptr(), static_cast<Py_ssize_t>(held.size() / 3), kind[0]});
      for (std::size_t i = 0; i < held.size(); i += 3) {
        const py::handle value = held[i + 1];
        Slot slot{py::handle(held[i]).ptr(), value.ptr(), nullptr, held[i + 2].ptr() == Py_True};
        if (kind == "p" && THPVariable_Check(value.ptr())) {
          slot.tensor = THPVariable_Unpack(value.ptr()).unsafeGetTensorImpl();
          slot.dtype = slot.tensor->dtype();
          slot.device = slot.tensor->device();
        }
        slots_.push_back(slot);
      }
    }
  }

  // Whether the dicts still hold it.
  bool unchanged() const {
    const Slot* slot = slots_.data();
    for (const Dict& dict : dicts_) {
      if (PyDict_GET_SIZE(dict.object) != dict.size) return false;
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t position = 0;
      for (Py_ssize_t i = 0; i < dict.size; ++i, ++slot) {
        PyDict_Next(dict.object, &position, &key, &value);
        if (key != slot->key || !same(dict.kind, *slot, value)) return false;
      }
    }
    return true;
  }

 private:
  struct Dict {
    PyObject* object;
    Py_ssize_t size;
    char kind;
  };
  struct Slot {
    PyObject* key;
    PyObject* value;
    const at::TensorImpl* tensor;
    bool trained;
    caffe2::TypeMeta dtype{};
    c10::Device device{c10::kCPU};
  };

  // A plain tensor in the place of a parameter is what torch.func.functional_call puts there for one call.
  static bool same(char kind, const Slot& slot, PyObject* now) {
    if (kind == 'b') return true;
    if (now != slot.value) return slot.tensor && Py_TYPE(now) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
    if (!slot.tensor) return true;
    // module.double() and module.to(device) give the same parameters other data
    return slot.tensor->requires_grad() == slot.trained && slot.tensor->dtype() == slot.dtype &&
           slot.tensor->device() == slot.device;
  }

  std::vector<Dict> dicts_;
  std::vector<Slot> slots_;
};

}  // namespace

void bind_module_watch(py::module_& module) {
  py::class_<ModuleWatch>(module, "ModuleWatch", "See ddp_lab/parallel/core/parameters.py.")
      .def(py::init<const py::tuple&>(), py::arg("seen"))
      .def("unchanged", &ModuleWatch::unchanged);
}

}  // namespace ddp_lab
