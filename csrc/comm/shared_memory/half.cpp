#include "comm/shared_memory/half.h"

#include <bit>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
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

__attribute__((target("avx,f16c"))) void widen_fast(const c10::Half* from, float* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < count; ++i) {
    to[i] = _cvtsh_ss(from[i].x);
  }
}

__attribute__((target("avx,f16c"))) void narrow_fast(const float* from, c10::Half* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), packed);
  }
  for (; i < count; ++i) {
    to[i].x = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
  }
}

__attribute__((target("avx2"))) void narrow_fast(const float* from, c10::BFloat16* to, std::size_t count) {
  narrow_all(from, to, count);
}

__attribute__((target("avx2"))) void add_fast(const c10::BFloat16* a, const c10::BFloat16* b, c10::BFloat16* to,
                                              std::size_t count) {
  add_all(a, b, to, count);
}

__attribute__((target("avx,f16c"))) void add_fast(const c10::Half* a, const c10::Half* b, c10::Half* to,
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

bool fast_half() {
  static const bool found = __builtin_cpu_supports("avx") != 0 && __builtin_cpu_supports("f16c") != 0;
  return found;
}

bool fast_bfloat16() {
  static const bool found = __builtin_cpu_supports("avx2") != 0;
  return found;
}

#elif defined(__aarch64__)

// Every aarch64 converts float16, eight at a time. Those with FEAT_FP16 (ARMv8.2) add them, too: the same bits, because
// a sum in float32 has more than twice the digits of a float16, so that rounding it again changes nothing.
// FEAT_BF16 rounds to bfloat16 in one instruction.

inline float16x8_t load(const c10::Half* from) { return vreinterpretq_f16_u16(vld1q_u16(&from->x)); }

inline void store(c10::Half* to, float16x8_t values) { vst1q_u16(&to->x, vreinterpretq_u16_f16(values)); }

void widen_fast(const c10::Half* from, float* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const float16x8_t values = load(from + i);
    vst1q_f32(to + i, vcvt_f32_f16(vget_low_f16(values)));
    vst1q_f32(to + i + 4, vcvt_high_f32_f16(values));
  }
  for (; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

void narrow_fast(const float* from, c10::Half* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    store(to + i, vcvt_high_f16_f32(vcvt_f16_f32(vld1q_f32(from + i)), vld1q_f32(from + i + 4)));
  }
  for (; i < count; ++i) {
    to[i] = from[i];
  }
}

void add_converted(const c10::Half* a, const c10::Half* b, c10::Half* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const float16x8_t first = load(a + i);
    const float16x8_t second = load(b + i);
    const float32x4_t low = vaddq_f32(vcvt_f32_f16(vget_low_f16(first)), vcvt_f32_f16(vget_low_f16(second)));
    const float32x4_t high = vaddq_f32(vcvt_high_f32_f16(first), vcvt_high_f32_f16(second));
    store(to + i, vcvt_high_f16_f32(vcvt_f16_f32(low), high));
  }
  for (; i < count; ++i) {
    to[i] = static_cast<float>(a[i]) + static_cast<float>(b[i]);
  }
}

__attribute__((target("arch=armv8.2-a+fp16"))) void add_fp16(const c10::Half* a, const c10::Half* b, c10::Half* to,
                                                             std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    store(to + i, vaddq_f16(load(a + i), load(b + i)));
  }
  for (; i < count; ++i) {
    to[i] = static_cast<float>(a[i]) + static_cast<float>(b[i]);
  }
}

void add_fast(const c10::Half* a, const c10::Half* b, c10::Half* to, std::size_t count) {
  static const bool adds = (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) != 0;
  return adds ? add_fp16(a, b, to, count) : add_converted(a, b, to, count);
}

__attribute__((target("arch=armv8.2-a+bf16"))) inline void store(c10::BFloat16* to, float32x4_t low, float32x4_t high) {
  vst1q_u16(&to->x, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high)));
}

// A NaN keeps its digits here, wherever it is in the array.
__attribute__((target("arch=armv8.2-a+bf16"))) inline c10::BFloat16 narrowed_bf16(float value) {
  return {std::bit_cast<std::uint16_t>(vcvth_bf16_f32(value)), c10::BFloat16::from_bits()};
}

__attribute__((target("arch=armv8.2-a+bf16"))) void narrow_fast(const float* from, c10::BFloat16* to,
                                                                std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    store(to + i, vld1q_f32(from + i), vld1q_f32(from + i + 4));
  }
  for (; i < count; ++i) {
    to[i] = narrowed_bf16(from[i]);
  }
}

__attribute__((target("arch=armv8.2-a+bf16"))) void add_fast(const c10::BFloat16* a, const c10::BFloat16* b,
                                                             c10::BFloat16* to, std::size_t count) {
  const auto low = [](uint16x8_t bits) { return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)); };
  const auto high = [](uint16x8_t bits) { return vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16)); };
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const uint16x8_t first = vld1q_u16(&a[i].x);
    const uint16x8_t second = vld1q_u16(&b[i].x);
    store(to + i, vaddq_f32(low(first), low(second)), vaddq_f32(high(first), high(second)));
  }
  for (; i < count; ++i) {
    to[i] = narrowed_bf16(widened(a[i]) + widened(b[i]));
  }
}

constexpr bool fast_half() { return true; }

bool fast_bfloat16() {
  static const bool found = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
  return found;
}

#endif

}  // namespace

void widen(const c10::Half* from, float* to, std::size_t count) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (fast_half()) {
    return widen_fast(from, to, count);
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
#if defined(__x86_64__) || defined(__aarch64__)
  if (fast_half()) {
    return narrow_fast(from, to, count);
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = from[i];
  }
}

void narrow(const float* from, c10::BFloat16* to, std::size_t count) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (fast_bfloat16()) {
    return narrow_fast(from, to, count);
  }
#endif
  narrow_all(from, to, count);
}

void add(const c10::Half* a, const c10::Half* b, c10::Half* to, std::size_t count) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (fast_half()) {
    return add_fast(a, b, to, count);
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = static_cast<float>(a[i]) + static_cast<float>(b[i]);
  }
}

void add(const c10::BFloat16* a, const c10::BFloat16* b, c10::BFloat16* to, std::size_t count) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (fast_bfloat16()) {
    return add_fast(a, b, to, count);
  }
#endif
  add_all(a, b, to, count);
}

}  // namespace ddp_lab::shared_memory
