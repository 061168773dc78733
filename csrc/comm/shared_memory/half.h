// float16 and bfloat16 to float32 and back, many at a time, with what the processor has: found out when the program
// runs, because what users install is compiled for every processor. All ways round to the nearest, ties to even.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>

namespace ddp_lab::shared_memory {

void widen(const c10::Half* from, float* to, std::size_t count);
void widen(const c10::BFloat16* from, float* to, std::size_t count);
void narrow(const float* from, c10::Half* to, std::size_t count);
void narrow(const float* from, c10::BFloat16* to, std::size_t count);

// to[i] = a[i] + b[i], by far the most frequent case, in one pass. `to` may be one of them.
void add(const c10::Half* a, const c10::Half* b, c10::Half* to, std::size_t count);
void add(const c10::BFloat16* a, const c10::BFloat16* b, c10::BFloat16* to, std::size_t count);

}  // namespace ddp_lab::shared_memory
