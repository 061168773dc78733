#include "comm/shared_memory/collectives.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "comm/shared_memory/kernels.h"

namespace ddp_lab::shared_memory {

namespace {

constexpr std::size_t kSmallBytes = 8192;  // below, every rank reduces everything: one round
// What each rank has of one round: less costs waits, and more no longer stays in the cache until the others have read
// it. Of 128 KiB to 2 MiB the best for 2, 4 and 8 ranks on two processors (`ddp-lab bench all-reduce`).
constexpr std::size_t kChunkBytes = 512 << 10;
constexpr std::size_t kAligned = 64;

static_assert(2 * kChunkBytes <= Group::kSlotBytes);

// Bytes of a piece when each rank's slot holds one for every rank.
std::size_t piece_bytes(const Group& group) {
  return kChunkBytes / static_cast<std::size_t>(group.size()) / kAligned * kAligned;
}

// A part of a range of bytes.
struct ByteRange {
  std::size_t first;
  std::size_t count;
};

// What rank `rank` reduces of so many bytes; whole elements, as they are smaller than what shares are rounded to.
ByteRange share_of(int rank, int size, std::size_t bytes) {
  const std::size_t each = (bytes + static_cast<std::size_t>(size) - 1) / static_cast<std::size_t>(size);
  const std::size_t rounded = (each + kAligned - 1) / kAligned * kAligned;
  const std::size_t first = std::min(bytes, static_cast<std::size_t>(rank) * rounded);
  return {first, std::min(rounded, bytes - first)};
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0 && to != from) {
    std::memcpy(to, from, bytes);
  }
}

// Calls round(first, count) for each part of so many bytes; once if there are none, since all ranks meet in it.
template <typename Round>
void in_rounds(std::size_t bytes, std::size_t most, Round round) {
  std::size_t first = 0;
  do {
    const std::size_t count = std::min(most, bytes - first);
    round(first, count);
    first += count;
  } while (first < bytes);
}

// Writes a piece for every other rank into this rank's slot.
void publish(Group& group, const std::vector<const std::byte*>& inputs, std::size_t first, std::size_t count) {
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    if (rank != static_cast<std::size_t>(group.rank())) {
      copy_bytes(group.own_slot() + rank * piece_bytes(group), inputs[rank] + first, count);
    }
  }
}

// The piece for this rank that rank `from` has published.
const std::byte* piece_of(Group& group, std::size_t from) {
  return group.slot_of(static_cast<int>(from)) + static_cast<std::size_t>(group.rank()) * piece_bytes(group);
}

void reduce_small(Group& group, const Pieces& array, const Reduction& reduction, int root, const WaitPolicy& policy) {
  array.read(group.own_slot(), 0, array.bytes());
  group.barrier(policy);
  if (root == kAll || root == group.rank()) {
    std::vector<const std::byte*> sources;
    for (int rank = 0; rank < group.size(); ++rank) {
      sources.push_back(group.slot_of(rank));
    }
    alignas(kAligned) std::array<std::byte, kSmallBytes> result;
    reduce(result.data(), sources, array.bytes() / reduction.item, reduction.dtype, reduction.op);
    array.write(0, array.bytes(), result.data());
  }
}

// Each rank reduces its share of every chunk. A round carries the inputs of one chunk and the results of the one before
// it: a slot holds first the chunk's inputs for the others, where they lie in the chunk, then this rank's result.
class SlotReduce {
 public:
  SlotReduce(Group& group, const Pieces& array, const Reduction& reduction, int root)
      : group_(group),
        array_(array),
        reduction_(reduction),
        wanted_(root == kAll || root == group.rank()),
        sources_(static_cast<std::size_t>(group.size())) {}

  std::size_t chunks() const { return (array_.bytes() + kChunkBytes - 1) / kChunkBytes; }

  // Before a round: what the others reduce of chunk `index`.
  void publish(std::size_t index) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      const ByteRange share = share_at(index, rank);
      if (rank != group_.rank()) {
        array_.read(group_.own_slot() + share.first, at(index, share), share.count);
      }
    }
  }

  // After it: this rank's share of that chunk.
  void reduce_share(std::size_t index) {
    const ByteRange share = share_at(index, group_.rank());
    for (std::size_t done = 0; done < share.count; done += kBlockBytes) {
      reduce_block(at(index, share) + done, share.first + done, done, std::min(kBlockBytes, share.count - done));
    }
  }

  // After the next one: what the others have made of it.
  void collect(std::size_t index) {
    for (int rank = 0; wanted_ && rank < group_.size(); ++rank) {
      const ByteRange share = share_at(index, rank);
      if (rank != group_.rank()) {
        array_.write(at(index, share), share.count, group_.slot_of(rank) + kResults);
      }
    }
  }

 private:
  static constexpr std::size_t kResults = kChunkBytes;  // where in a slot they begin
  static constexpr std::size_t kBlockBytes = 8192;      // read, reduced and written while they are in the first cache

  // So many bytes that lie at `first` in the array, at `place` in the slots' inputs and at `done` in the results.
  void reduce_block(std::size_t first, std::size_t place, std::size_t done, std::size_t count) {
    std::byte* const result = group_.own_slot() + kResults + done;
    const std::byte* own = array_.place_of(first, count);
    if (own == nullptr) {
      array_.read(result, first, count);
      own = result;
    }
    for (int rank = 0; rank < group_.size(); ++rank) {
      sources_[static_cast<std::size_t>(rank)] = rank == group_.rank() ? own : group_.slot_of(rank) + place;
    }
    reduce(result, sources_, count / reduction_.item, reduction_.dtype, reduction_.op);
    if (wanted_) {
      array_.write(first, count, result);
    }
  }

  ByteRange share_at(std::size_t index, int rank) const {
    return share_of(rank, group_.size(), std::min(kChunkBytes, array_.bytes() - index * kChunkBytes));
  }
  static std::size_t at(std::size_t index, const ByteRange& share) { return index * kChunkBytes + share.first; }

  Group& group_;
  const Pieces& array_;
  const Reduction& reduction_;
  const bool wanted_;
  std::vector<const std::byte*> sources_;  // of a block, by rank
};

// Where every rank's data lies in its pool: each reduces its share of a chunk where it is, and reads the other shares
// from where they were reduced.
void reduce_in_pools(Group& group, std::byte* data, std::size_t bytes, const Reduction& reduction,
                     const WaitPolicy& policy) {
  for (std::size_t first = 0; first < bytes; first += kChunkBytes) {
    const std::size_t count = std::min(kChunkBytes, bytes - first);
    const ByteRange own = share_of(group.rank(), group.size(), count);
    std::vector<const std::byte*> sources;
    for (int rank = 0; rank < group.size(); ++rank) {
      sources.push_back((rank == group.rank() ? data : group.in_pool_of(rank)) + first + own.first);
    }
    reduce(data + first + own.first, sources, own.count / reduction.item, reduction.dtype, reduction.op);
    group.barrier(policy);
    for (int rank = 0; rank < group.size(); ++rank) {
      const ByteRange share = share_of(rank, group.size(), count);
      if (rank != group.rank()) {
        copy_bytes(data + first + share.first, group.in_pool_of(rank) + first + share.first, share.count);
      }
    }
  }
  group.barrier(policy);  // all have read: the data is its owner's again
}

void reduce_large(Group& group, const Pieces& array, const Reduction& reduction, int root, const WaitPolicy& policy) {
  SlotReduce slots(group, array, reduction, root);
  if (!group.in_own_pool()) {
    slots.publish(0);
  }
  group.barrier(policy);
  if (group.in_all_pools()) {
    return reduce_in_pools(group, array.place_of(0, array.bytes()), array.bytes(), reduction, policy);
  }
  if (group.in_some_pool()) {  // those ranks have to copy, too
    slots.publish(0);
    group.barrier(policy);
  }
  slots.reduce_share(0);
  for (std::size_t chunk = 1; chunk <= slots.chunks(); ++chunk) {
    const bool more = chunk < slots.chunks();
    if (more) {
      slots.publish(chunk);
    }
    group.barrier(policy);
    slots.collect(chunk - 1);
    if (more) {
      slots.reduce_share(chunk);
    }
  }
}

}  // namespace

void all_reduce(Group& group, const Pieces& array, const Reduction& reduction, int root, const WaitPolicy& policy) {
  if (array.bytes() <= kSmallBytes) {
    reduce_small(group, array, reduction, root, policy);
  } else {
    reduce_large(group, array, reduction, root, policy);
  }
}

void broadcast(Group& group, std::byte* data, std::size_t bytes, int root, const WaitPolicy& policy) {
  in_rounds(bytes, kChunkBytes, [&](std::size_t first, std::size_t count) {
    if (group.rank() == root) {
      copy_bytes(group.own_slot(), data + first, count);
    }
    group.barrier(policy);
    if (group.rank() != root) {
      copy_bytes(data + first, group.slot_of(root), count);
    }
  });
}

void all_gather(Group& group, const std::byte* input, const std::vector<std::byte*>& outputs, std::size_t bytes,
                int root, const WaitPolicy& policy) {
  const bool wanted = root == kAll || root == group.rank();
  in_rounds(bytes, kChunkBytes, [&](std::size_t first, std::size_t count) {
    if (root != group.rank()) {
      copy_bytes(group.own_slot(), input + first, count);
    }
    group.barrier(policy);
    for (int rank = 0; wanted && rank < group.size(); ++rank) {
      const std::byte* const from = rank == group.rank() ? input + first : group.slot_of(rank);
      copy_bytes(outputs[static_cast<std::size_t>(rank)] + first, from, count);
    }
  });
}

void scatter(Group& group, const std::vector<const std::byte*>& inputs, std::byte* output, std::size_t bytes, int root,
             const WaitPolicy& policy) {
  const auto from = static_cast<std::size_t>(root);
  in_rounds(bytes, piece_bytes(group), [&](std::size_t first, std::size_t count) {
    publish(group, inputs, first, count);  // without effect but on the root
    group.barrier(policy);
    copy_bytes(output + first, group.rank() == root ? inputs[from] + first : piece_of(group, from), count);
  });
}

void all_to_all(Group& group, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs,
                const WaitPolicy& policy) {
  const std::size_t ranks = inputs.size();
  const auto own = static_cast<std::size_t>(group.rank());
  std::vector<std::uint64_t> sizes(2 * ranks);  // that this rank sends, then those that it expects
  std::transform(inputs.begin(), inputs.end(), sizes.begin(), [](const Piece& piece) { return piece.bytes; });
  std::transform(outputs.begin(), outputs.end(), sizes.begin() + static_cast<std::ptrdiff_t>(ranks),
                 [](const Piece& piece) { return piece.bytes; });
  std::memcpy(group.own_slot(), sizes.data(), sizes.size() * sizeof(std::uint64_t));
  group.barrier(policy);
  std::vector<const std::uint64_t*> of_rank;
  for (int rank = 0; rank < group.size(); ++rank) {
    of_rank.push_back(reinterpret_cast<const std::uint64_t*>(group.slot_of(rank)));
  }
  std::uint64_t largest = 0;
  for (std::size_t from = 0; from < ranks; ++from) {
    for (std::size_t to = 0; to < ranks; ++to) {
      const std::uint64_t sent = of_rank[from][to];
      const std::uint64_t expected = of_rank[to][ranks + from];
      if (sent != expected) {
        group.fail(group.name(static_cast<int>(from)) + " sends " + std::to_string(sent) + " B to " +
                   group.name(static_cast<int>(to)) + ", which expects " + std::to_string(expected) +
                   " B, in all_to_all");
      }
      largest = std::max(largest, sent);
    }
  }
  const std::size_t piece = piece_bytes(group);
  const auto left = [&](const Piece& one, std::size_t first) {
    return std::min(piece, one.bytes - std::min(first, one.bytes));
  };
  for (std::size_t first = 0; first < largest; first += piece) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (rank != own) {
        copy_bytes(group.own_slot() + rank * piece, inputs[rank].data + first, left(inputs[rank], first));
      }
    }
    group.barrier(policy);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const std::byte* const from = rank == own ? inputs[own].data + first : piece_of(group, rank);
      copy_bytes(outputs[rank].data + first, from, left(outputs[rank], first));
    }
  }
}

void reduce_scatter(Group& group, const std::vector<const std::byte*>& inputs, std::byte* output, std::size_t elements,
                    const Reduction& reduction, const WaitPolicy& policy) {
  const auto own = static_cast<std::size_t>(group.rank());
  in_rounds(elements * reduction.item, piece_bytes(group), [&](std::size_t first, std::size_t count) {
    publish(group, inputs, first, count);
    group.barrier(policy);
    std::vector<const std::byte*> sources;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      sources.push_back(rank == own ? inputs[own] + first : piece_of(group, rank));
    }
    reduce(output + first, sources, count / reduction.item, reduction.dtype, reduction.op);
  });
}

}  // namespace ddp_lab::shared_memory
