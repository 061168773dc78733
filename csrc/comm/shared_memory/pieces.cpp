#include "comm/shared_memory/pieces.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/shared_memory/kernels.h"

namespace ddp_lab::shared_memory {

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
