#include "comm/shared_memory/half.h"

#include <bit>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ddp_lab::shared_memory {

namespace {

inline __attribute__((always_inline)) float widened(c10::BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.x) << 16);
}

// Without a branch, so that the compiler makes vectors of a loop.
inline __attribute__((always_inline)) c10::BFloat16 narrowed(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool number = (bits & 0x7fffffff) <= 0x7f800000;
  return {static_cast<std::uint16_t>(number ? rounded : 0x7fc0), c10::BFloat16::from_bits()};
}

inline __attribute__((always_inline)) void narrow_all(const float* from, c10::BFloat16* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = narrowed(from[i]);
  }
}

inline __attribute__((always_inline)) void add_all(const c10::BFloat16* a, const c10::BFloat16* b, c10::BFloat16* to,
                                                   std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = narrowed(widened(a[i]) + widened(b[i]));
  }
}

#if defined(__x86_64__)

__attribute__((target("avx,f16c"))) void widen_f16c(const c10::Half* from, float* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < count; ++i) {
    to[i] = _cvtsh_ss(from[i].x);
  }
}

__attribute__((target("avx,f16c"))) void narrow_f16c(const float* from, c10::Half* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), packed);
  }
  for (; i < count; ++i) {
    to[i].x = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
  }
}

__attribute__((target("avx2"))) void narrow_avx2(const float* from, c10::BFloat16* to, std::size_t count) {
  narrow_all(from, to, count);
}

__attribute__((target("avx2"))) void add_avx2(const c10::BFloat16* a, const c10::BFloat16* b, c10::BFloat16* to,
                                              std::size_t count) {
  add_all(a, b, to, count);
}

__attribute__((target("avx,f16c"))) void add_f16c(const c10::Half* a, const c10::Half* b, c10::Half* to,
                                                  std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 first = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i)));
    const __m256 second = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i)));
    const __m128i sum = _mm256_cvtps_ph(_mm256_add_ps(first, second), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), sum);
  }
  for (; i < count; ++i) {
    to[i].x = _cvtss_sh(_cvtsh_ss(a[i].x) + _cvtsh_ss(b[i].x), _MM_FROUND_TO_NEAREST_INT);
  }
}

bool has_f16c() {
  static const bool found = __builtin_cpu_supports("avx") != 0 && __builtin_cpu_supports("f16c") != 0;
  return found;
}

bool has_avx2() {
  static const bool found = __builtin_cpu_supports("avx2") != 0;
  return found;
}

#endif

}  // namespace

void widen(const c10::Half* from, float* to, std::size_t count) {
#if defined(__x86_64__)
  if (has_f16c()) {
    return widen_f16c(from, to, count);
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

void widen(const c10::BFloat16* from, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = widened(from[i]);
  }
}

void narrow(const float* from, c10::Half* to, std::size_t count) {
#if defined(__x86_64__)
  if (has_f16c()) {
    return narrow_f16c(from, to, count);
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = from[i];
  }
}

void narrow(const float* from, c10::BFloat16* to, std::size_t count) {
#if defined(__x86_64__)
  if (has_avx2()) {
    return narrow_avx2(from, to, count);
  }
#endif
  narrow_all(from, to, count);
}

void add(const c10::Half* a, const c10::Half* b, c10::Half* to, std::size_t count) {
#if defined(__x86_64__)
  if (has_f16c()) {
    return add_f16c(a, b, to, count);
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = static_cast<float>(a[i]) + static_cast<float>(b[i]);
  }
}

void add(const c10::BFloat16* a, const c10::BFloat16* b, c10::BFloat16* to, std::size_t count) {
#if defined(__x86_64__)
  if (has_avx2()) {
    return add_avx2(a, b, to, count);
  }
#endif
  add_all(a, b, to, count);
}

}  // namespace ddp_lab::shared_memory
