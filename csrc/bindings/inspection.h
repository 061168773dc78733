// What the reducer and the observation of torch's reducer tell Python of averaged gradients.
#pragma once

#include <pybind11/pybind11.h>

#include "reduce/inspection.h"

namespace ddp_lab {

// callback(step, [(norm, checksum) of each bucket]), which any thread may call and drop without the GIL.
Inspector::Callback inspection_callback(pybind11::object callback);

}  // namespace ddp_lab
