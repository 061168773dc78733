#include "comm/shared_memory/kernels.h"

#include <ATen/Dispatch.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#include "comm/shared_memory/half.h"

namespace ddp_lab::shared_memory {

namespace {

using Op = c10d::ReduceOp::RedOpType;
using Sources = std::vector<const std::byte*>;

constexpr std::size_t kBlock = 2048;  // elements that stay in the first cache while all sources are added

// NaN wins, as in torch.
constexpr auto smaller = [](auto a, auto b) { return (b < a || b != b) ? b : a; };
constexpr auto larger = [](auto a, auto b) { return (b > a || b != b) ? b : a; };

// The type in which elements are combined.
template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<c10::Half> {
  using type = float;
};
template <>
struct Wide<c10::BFloat16> {
  using type = float;
};

template <typename T>
const T* at_block(const std::byte* source, std::size_t first) {
  return reinterpret_cast<const T*>(source) + first;
}

// Loops that `python -m tests.vectorised` finds by their names; x86-64 is up to 30 % slower so.
#if defined(__aarch64__)
#define ALONE [[gnu::noinline]]
#else
#define ALONE
#endif

template <typename T, typename Combine, typename Finish>
ALONE void combine_all(std::byte* into, const Sources& sources, std::size_t elements, Combine combine, Finish finish) {
  using W = typename Wide<T>::type;
  constexpr bool wider = !std::is_same_v<W, T>;
  std::array<W, kBlock> block;
  std::array<W, wider ? kBlock : 0> other;  // a source's elements, where they are narrower
  const auto elements_of = [&](const T* source, std::size_t count) -> const W* {
    if constexpr (wider) {
      widen(source, other.data(), count);
      return other.data();
    } else {
      return source;
    }
  };
  for (std::size_t first = 0; first < elements; first += kBlock) {
    const std::size_t count = std::min(kBlock, elements - first);
    const W* source = elements_of(at_block<T>(sources[0], first), count);
    std::copy_n(source, count, block.data());
    for (std::size_t rank = 1; rank < sources.size(); ++rank) {
      source = elements_of(at_block<T>(sources[rank], first), count);
      for (std::size_t i = 0; i < count; ++i) {
        block[i] = combine(block[i], source[i]);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      block[i] = finish(block[i]);
    }
    T* to = reinterpret_cast<T*>(into) + first;
    if constexpr (wider) {
      narrow(block.data(), to, count);
    } else {
      std::copy_n(block.data(), count, to);
    }
  }
}

// Two ranks of a plain sum, by far the most frequent case, in one pass.
template <typename T>
ALONE void add_two(std::byte* into, const Sources& sources, std::size_t elements) {
  const T* a = at_block<T>(sources[0], 0);
  const T* b = at_block<T>(sources[1], 0);
  T* to = reinterpret_cast<T*>(into);
  if constexpr (!std::is_same_v<typename Wide<T>::type, T>) {
    add(a, b, to, elements);
  } else {
    for (std::size_t i = 0; i < elements; ++i) {
      to[i] = a[i] + b[i];
    }
  }
}

template <typename T>
void reduce_numbers(std::byte* into, const Sources& sources, std::size_t elements, Op op) {
  using W = typename Wide<T>::type;
  const auto plainly = [&](auto combine) { combine_all<T>(into, sources, elements, combine, std::identity()); };
  if (op == Op::SUM) {
    return sources.size() == 2 ? add_two<T>(into, sources, elements) : plainly(std::plus<W>());
  }
  if (op == Op::PRODUCT) {
    return plainly(std::multiplies<W>());
  }
  if constexpr (!c10::is_complex<T>::value) {
    if (op == Op::MIN || op == Op::MAX) {
      return op == Op::MIN ? plainly(smaller) : plainly(larger);
    }
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == Op::BAND) {
      return plainly(std::bit_and<W>());
    }
    return op == Op::BOR ? plainly(std::bit_or<W>()) : plainly(std::bit_xor<W>());
  } else {
    const auto count = static_cast<W>(static_cast<float>(sources.size()));
    combine_all<T>(into, sources, elements, std::plus<W>(), [count](W sum) { return static_cast<W>(sum / count); });
  }
}

template <typename T>
ALONE void scale(std::byte* to, const std::byte* from, std::size_t bytes, double factor) {
  T* target = reinterpret_cast<T*>(to);
  const T* source = reinterpret_cast<const T*>(from);
  const T by = static_cast<T>(factor);
  for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
    target[i] = source[i] * by;
  }
}

// bool: a sum is "any", a product "all".
void reduce_bools(std::byte* into, const Sources& sources, std::size_t elements, Op op) {
  if (op == Op::BXOR) {
    return reduce_numbers<std::uint8_t>(into, sources, elements, Op::BXOR);
  }
  const bool any = op == Op::SUM || op == Op::MAX || op == Op::BOR;
  reduce_numbers<std::uint8_t>(into, sources, elements, any ? Op::BOR : Op::BAND);
}

// Others are refused, because `reduce_numbers` would run an unknown one as AVG or BXOR.
constexpr std::array kKnownOps{Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR};
constexpr std::array<at::ScalarType, 12> kReduced{at::kFloat,        at::kDouble,        at::kHalf, at::kBFloat16,
                                                  at::kComplexFloat, at::kComplexDouble, at::kByte, at::kChar,
                                                  at::kShort,        at::kInt,           at::kLong, at::kBool};

}  // namespace

void check_reducible(at::ScalarType dtype, Op op) {
  TORCH_CHECK(std::find(kReduced.begin(), kReduced.end(), dtype) != kReduced.end(), "shm can't reduce tensors of ",
              dtype, ": convert them, e.g. to float32");
  TORCH_CHECK(std::find(kKnownOps.begin(), kKnownOps.end(), op) != kKnownOps.end(),
              "shm does not support this reduction: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR");
  const bool integer = at::isIntegralType(dtype, /*includeBool=*/true);
  const bool bitwise = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  TORCH_CHECK(!bitwise || integer, "Cannot use ReduceOp.",
              op == Op::BAND  ? "BAND"
              : op == Op::BOR ? "BOR"
                              : "BXOR",
              " with tensors of ", dtype, ", only with integers and bool");
  TORCH_CHECK(op != Op::AVG || !integer, "Cannot use ReduceOp.AVG with tensors of ", dtype,
              ", only with floating and complex ones");
  TORCH_CHECK((op != Op::MIN && op != Op::MAX) || !at::isComplexType(dtype),
              "all_reduce does not support ReduceOp.MIN and ReduceOp.MAX on complex tensors");
}

void reduce(std::byte* into, const Sources& sources, std::size_t elements, at::ScalarType dtype, Op op) {
  if (dtype == at::kBool) {
    return reduce_bools(into, sources, elements, op);
  }
  AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND2(at::kHalf, at::kBFloat16, dtype, "shm: reduce",
                                         [&] { reduce_numbers<scalar_t>(into, sources, elements, op); });
}

void copy_scaled(std::byte* to, const std::byte* from, std::size_t bytes, at::ScalarType dtype, double factor) {
  TORCH_INTERNAL_ASSERT(dtype == at::kFloat || dtype == at::kDouble, "only these are scaled, not ", dtype);
  if (dtype == at::kFloat) {
    scale<float>(to, from, bytes, factor);
  } else {
    scale<double>(to, from, bytes, factor);
  }
}

Pieces::Pieces(std::byte* data, std::size_t bytes) : Pieces({{data, data, bytes, false}}, at::kByte, 1.0) {}

Pieces::Pieces(std::vector<SumPiece> pieces, at::ScalarType dtype, double factor)
    : pieces_(std::move(pieces)), dtype_(dtype), factor_(factor) {
  for (const SumPiece& piece : pieces_) {
    begins_.push_back(bytes_);
    bytes_ += piece.bytes;
  }
}

std::size_t Pieces::piece_at(std::size_t byte) const {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), byte);
  return static_cast<std::size_t>(after - begins_.begin()) - 1;
}

template <typename Function>
void Pieces::each(std::size_t first, std::size_t bytes, Function function) const {
  for (std::size_t done = 0, index = bytes == 0 ? 0 : piece_at(first); done < bytes; ++index) {
    const SumPiece& piece = pieces_[index];
    const std::size_t inside = first + done - begins_[index];
    const std::size_t count = std::min(bytes - done, piece.bytes - inside);
    function(piece, inside, done, count);
    done += count;
  }
}

std::byte* Pieces::place_of(std::size_t first, std::size_t bytes) const {
  if (bytes == 0 || pieces_.empty()) {
    return nullptr;
  }
  const std::size_t index = piece_at(first);
  const SumPiece& piece = pieces_[index];
  const bool whole = first + bytes <= begins_[index] + piece.bytes;
  return whole && !piece.scaled && piece.source == piece.target ? piece.target + (first - begins_[index]) : nullptr;
}

void Pieces::read(std::byte* to, std::size_t first, std::size_t bytes) const {
  each(first, bytes, [&](const SumPiece& piece, std::size_t inside, std::size_t at, std::size_t count) {
    if (piece.scaled) {
      copy_scaled(to + at, piece.source + inside, count, dtype_, factor_);
    } else {
      std::memcpy(to + at, piece.source + inside, count);
    }
  });
}

void Pieces::write(std::size_t first, std::size_t bytes, const std::byte* from) const {
  each(first, bytes, [&](const SumPiece& piece, std::size_t inside, std::size_t at, std::size_t count) {
    if (piece.target + inside != from + at) {
      std::memcpy(piece.target + inside, from + at, count);
    }
  });
}

}  // namespace ddp_lab::shared_memory
