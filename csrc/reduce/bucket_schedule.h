// BucketSchedule: in which order the buckets of one backward are launched. A state machine with no tensors,
// no threads and no network, so that it is tested, replayed and simulated alone.
//
// A bucket is pending until each of its parameters has its gradient, then ready. Buckets are launched in
// bucket order on every rank, whatever the order of arrival: that is what makes the collectives of the ranks
// match. So a ready bucket is launched as soon as all buckets before it are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace ddp_lab {

// A transition that the state does not allow; the message names the parameter, the bucket and its state.
class BucketStateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class BucketState : std::uint8_t { kPending, kReady, kLaunched, kReduced };

const char* to_string(BucketState state) noexcept;

class BucketSchedule {
 public:
  // Buckets [begin, end): launches are consecutive.
  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
    bool empty() const noexcept { return begin == end; }
  };

  // `buckets[b]` holds the indices of the parameters of bucket b. Indices need not be consecutive (frozen
  // parameters are in no bucket). Throws BucketStateError if a bucket is empty or a parameter is in two buckets.
  // The schedule starts finished: arm() begins a backward.
  explicit BucketSchedule(const std::vector<std::vector<std::size_t>>& buckets);

  // Begins a backward: every bucket pending. Also what discards one that was abandoned.
  void arm();

  // The gradient of `parameter` is ready. Returns the buckets to launch now, in this order; they count as
  // launched from here on. No allocation.
  Range mark_ready(std::size_t parameter);

  // The collective of `bucket` has completed.
  void mark_reduced(std::size_t bucket);

  BucketState state(std::size_t bucket) const;
  std::size_t bucket_of(std::size_t parameter) const;

  std::size_t size() const noexcept { return buckets_.size(); }
  std::size_t launched() const noexcept { return launched_; }  // buckets [0, launched()) have been launched
  bool all_launched() const noexcept { return launched_ == buckets_.size(); }
  bool finished() const noexcept { return reduced_ == buckets_.size(); }  // every bucket is reduced

  // Parameters whose gradient has not arrived since arm(), in bucket order.
  std::vector<std::size_t> missing() const;

 private:
  struct Bucket {
    std::vector<std::size_t> parameters;
    std::size_t waiting = 0;  // gradients that have not arrived
    BucketState state = BucketState::kReduced;
  };
  struct Parameter {
    std::size_t bucket = 0;
    bool known = false;  // in a bucket
    bool ready = true;
  };

  // Return their argument, or throw BucketStateError.
  std::size_t checked_parameter(std::size_t parameter) const;
  std::size_t checked_bucket(std::size_t bucket) const;

  std::vector<Bucket> buckets_;
  std::vector<Parameter> parameters_;  // by parameter index
  std::size_t launched_ = 0;
  std::size_t reduced_ = 0;
};

}  // namespace ddp_lab
