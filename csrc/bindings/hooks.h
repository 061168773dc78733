// What the bindings of the reducer need from those of comm hooks.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "reduce/comm_hook.h"

namespace ddp_lab {

// A hook that calls `hook(state, bucket)`, which returns a torch.futures.Future of a tensor.
HookPointer make_python_hook(pybind11::object state, pybind11::object hook);

// A copy of the bucket that a Python object of the class above stands for; it shares the buffer.
std::unique_ptr<GradBucket> copy_of(const GradBucket& bucket);

// A torch.futures.Future, and back.
pybind11::object to_python(FuturePointer future);
FuturePointer to_future(const pybind11::object& future);

}  // namespace ddp_lab
