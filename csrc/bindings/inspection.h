// What the reducer and the observation of torch's reducer tell Python of averaged gradients.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "reduce/inspection.h"

namespace ddp_lab {

// callback(step, [(norm, checksum) of each bucket]), which any thread may call and drop without the GIL.
std::function<void(std::int64_t, const std::vector<Inspection>&)> inspection_callback(pybind11::object callback);

}  // namespace ddp_lab
