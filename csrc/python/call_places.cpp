#include "python/call_places.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "record/black_box.h"
#include "record/json.h"

namespace ddp_lab {

const std::array<const char*, 8> kUses{"",          "forward",    "forward ahead", "backward", "backward ahead",
                                       "reduction", "evaluation", "buffers"};

namespace {

constexpr std::array<const char*, 9> kReductions{"sum",  "avg", "product", "min",       "max",
                                                 "band", "bor", "bxor",    "premul_sum"};

// [Note: the place of a collective]
// The innermost frame whose file is the user's: neither torch's, nor ours, nor another library's. Frames above it are
// looked at for the group of parameters that fully_shard has the collective for. A file is judged once, by the object
// that holds its name: all functions of a module have the same one. Places have an index by code object and
// instruction; both kinds of objects are kept, so that no other one gets their address. A program that makes code
// without end (a notebook does with each run of a cell) reaches the limits; then what is new has no place.
constexpr std::size_t kMostPlaces = 4096;
constexpr std::size_t kMostCalls = kMostPlaces + 1024;
constexpr std::size_t kMostFiles = 16384;
constexpr int kMostFrames = 256;

enum class File : std::uint8_t { kUsers, kLibrarys, kFullyShards };

constexpr std::string_view kFullyShard = "/distributed/fsdp/_fully_shard/_fsdp_param_group.py";

struct Place {
  Call call;
  const PyCodeObject* code = nullptr;
  int instruction = -1;
  const PyObject* module = nullptr;  // its name

  bool operator==(const Place&) const = default;
};

struct HashOfPlace {
  std::size_t operator()(const Place& place) const {
    std::size_t hash = std::hash<const void*>()(place.code) ^ std::hash<const void*>()(place.module) * 31;
    for (const int number : {place.instruction, place.call.dtype, place.call.reduction, place.call.reducer,
                             place.call.bucket, static_cast<int>(place.call.use)}) {
      hash = hash * 1'000'003 + static_cast<std::size_t>(number);
    }
    return hash ^ std::hash<const void*>()(place.call.operation);
  }
};

// Guarded by `mutex`; who has it does not wait for the GIL.
struct Known {
  std::mutex mutex;
  std::unordered_map<Place, std::int32_t, HashOfPlace> calls;
  std::vector<std::string> taken;  // not yet
  std::unordered_map<const PyObject*, File> files;
  std::vector<std::string> libraries;
};

Known& known() {
  static auto* const kept = new Known;  // other threads may outlive statics
  return *kept;
}

std::string text_of(PyObject* text) {
  const char* const bytes = text != nullptr && PyUnicode_Check(text) ? PyUnicode_AsUTF8(text) : nullptr;
  if (bytes == nullptr) PyErr_Clear();
  return bytes == nullptr ? "" : bytes;
}

File judge(const std::string& file) {
  if (file.ends_with(kFullyShard)) return File::kFullyShards;
  if (file.starts_with("<cell ")) return File::kUsers;
  const auto& libraries = known().libraries;
  const bool librarys = file.starts_with('<') || std::any_of(libraries.begin(), libraries.end(),
                                                             [&](const auto& one) { return file.starts_with(one); });
  return librarys ? File::kLibrarys : File::kUsers;
}

File file_of(const PyCodeObject* code) {
  PyObject* const name = code->co_filename;
  const std::lock_guard<std::mutex> lock(known().mutex);
  auto& files = known().files;
  const auto found = files.find(name);
  if (found != files.end()) return found->second;
  const File judged = judge(text_of(name));
  if (files.size() < kMostFiles) {
    Py_INCREF(name);
    files.emplace(name, judged);
  }
  return judged;
}

int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti;
#endif
}

// New reference to a local variable, or null.
PyObject* variable_of(PyFrameObject* frame, const char* name) {
#if PY_VERSION_HEX >= 0x030C0000
  PyObject* const found = PyFrame_GetVarString(frame, name);
#else
  PyObject* const all = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_locals");
  PyObject* const found = all == nullptr ? nullptr : PyMapping_GetItemString(all, name);
  Py_XDECREF(all);
#endif
  if (found == nullptr) PyErr_Clear();
  return found;
}

// New reference to the name of the module whose parameters a method of fully_shard handles, or null.
PyObject* module_of(PyFrameObject* frame) {
  PyObject* const self = variable_of(frame, "self");
  if (self == nullptr) return nullptr;
  PyObject* name = PyObject_GetAttrString(self, "_module_fqn");
  if (name == nullptr) PyErr_Clear();
  Py_DECREF(self);
  if (name == nullptr || !PyUnicode_Check(name)) {
    Py_XDECREF(name);
    return nullptr;
  }
  PyUnicode_InternInPlace(&name);  // equal names are one object then
  return name;
}

// What is found on the stack: references of its own.
struct Found {
  PyFrameObject* frame = nullptr;  // the user's
  PyCodeObject* code = nullptr;
  PyObject* module = nullptr;

  Found() = default;
  ~Found() {
    Py_XDECREF(reinterpret_cast<PyObject*>(frame));
    Py_XDECREF(reinterpret_cast<PyObject*>(code));
    Py_XDECREF(module);
  }
  Found(const Found&) = delete;
  Found& operator=(const Found&) = delete;
};

void look(PyThreadState* thread, Found& found) {
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  for (int count = 0; frame != nullptr && count < kMostFrames; ++count) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const File file = file_of(code);
    if (file == File::kUsers) {
      found.frame = frame;
      found.code = code;
      return;
    }
    if (file == File::kFullyShards && found.module == nullptr) found.module = module_of(frame);
    Py_DECREF(reinterpret_cast<PyObject*>(code));
    PyFrameObject* const caller = PyFrame_GetBack(frame);
    Py_DECREF(reinterpret_cast<PyObject*>(frame));
    frame = caller;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(frame));
}

// Needs the GIL.
std::string describe(std::int32_t index, const Place& place, const Found& found) {
  const Call& call = place.call;
  Json made;
  made.add("type", "call");
  made.add("index", index);
  made.add("operation", call.operation);
  if (call.dtype >= 0) {
    const auto* const dtype = torch::getTHPDtype(static_cast<at::ScalarType>(call.dtype));
    made.add("dtype", reinterpret_cast<const THPDtype*>(dtype)->name);
  }
  if (call.reduction >= 0 && call.reduction < static_cast<int>(kReductions.size())) {
    made.add("reduction", kReductions[static_cast<std::size_t>(call.reduction)]);
  }
  if (call.reducer >= 0) {
    made.add("reducer", call.reducer);
    made.add("bucket", call.bucket);
  }
  if (call.use != Use::kNotSaid) made.add("use", kUses[static_cast<std::size_t>(call.use)]);
  const std::string file = found.frame == nullptr ? "" : text_of(found.code->co_filename);
  if (!file.empty()) {
    made.add("file", file);
    made.add("line", PyFrame_GetLineNumber(found.frame));
    made.add("function", text_of(found.code->co_name));
  }
  const std::string module = found.module == nullptr ? "" : text_of(found.module);
  if (!module.empty()) made.add("module", module);
  return made.text();
}

constexpr std::int32_t kNoRoom = -2;  // for another place

std::int32_t index_of(const Call& call, const Found& found) {
  const Place place{call, found.code, found.frame == nullptr ? -1 : instruction_of(found.frame), found.module};
  const std::lock_guard<std::mutex> lock(known().mutex);
  auto& calls = known().calls;
  const auto seen = calls.find(place);
  if (seen != calls.end()) return seen->second;
  const bool placed = place.code != nullptr || place.module != nullptr;
  if (placed && calls.size() >= kMostPlaces) return kNoRoom;
  if (calls.size() >= kMostCalls) return -1;
  const auto index = static_cast<std::int32_t>(calls.size());
  std::string made = describe(index, place, found);
  Py_XINCREF(reinterpret_cast<PyObject*>(found.code));
  Py_XINCREF(found.module);
  calls.emplace(place, index);
  leave(made);
  known().taken.push_back(std::move(made));
  return index;
}

}  // namespace

std::int32_t find_call(const Call& call) {
  PyThreadState* const thread = Py_IsInitialized() != 0 ? PyGILState_GetThisThreadState() : nullptr;
  if (thread == nullptr) return index_of(call, Found());  // no thread of Python's: there are no frames
  const PyGILState_STATE state = PyGILState_Ensure();
  std::int32_t index = -1;
  {
    const pybind11::error_scope error_of_the_caller;
    Found found;
    look(thread, found);
    index = index_of(call, found);
    if (index == kNoRoom) index = index_of(call, Found());
  }
  PyGILState_Release(state);
  return index;
}

void set_library_folders(std::vector<std::string> folders) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  known().libraries = std::move(folders);
}

std::vector<std::string> take_new_calls() {
  const std::lock_guard<std::mutex> lock(known().mutex);
  return std::exchange(known().taken, {});
}

}  // namespace ddp_lab
