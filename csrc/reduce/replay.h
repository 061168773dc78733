// Replay: what one backward would take with other buckets and another link, from recorded times of readiness. Standard
// library only, like the BucketSchedule that it goes through.
//
// [Note: the replay's model]
// Each rank's backward is a list of gradients at given times of its own computation. The rank launches buckets when its
// BucketSchedule says so. A collective begins when all ranks have launched it, all earlier ones have begun and one of
// the backend's `lanes` is free (NCCL: one stream; Gloo: two threads). It takes a latency, which nothing shortens or
// shares, and then a transfer: of k transfers under way each runs at the rate 1 / (1 + (k - 1) * sharing), so 1 is one
// link that they share and 0 is a link for each. Computation and communication may be in each other's way (CPU ranks
// communicate with the cores that compute): while a collective is under way a rank computes at the rate
// 1 / (1 + compute_slowdown), and while the share c of the ranks computes a collective goes on at the rate
// 1 / (1 + c * comm_slowdown). After its computation a rank waits for the buckets in order and writes each back.
// Rates are constant between two events, so time jumps from event to event: the result is exact and needs no step size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp_lab {

// What was recorded; all times in ns.
struct Recorded {
  std::vector<std::vector<double>> ready;  // [rank][parameter], from the rank's begin of backward
  std::vector<double> begin;               // [rank], the backward's begin, from the step's
  std::vector<double> computed;            // [rank], the end of its computation, from its begin of backward
};

struct Contention {
  double compute_slowdown = 0;
  double comm_slowdown = 0;
  double sharing = 1;
  std::size_t lanes = 1;
};

// Of each bucket, in ns.
struct Costs {
  std::vector<double> launch;      // computation of each rank at its launch (a comm hook's encoding)
  std::vector<double> latency;     // of the collective
  std::vector<double> transfer;    // of the collective, alone on the link
  std::vector<double> write_back;  // computation after its end
};

// Times from the step's begin, in ns.
struct Replayed {
  std::vector<std::vector<double>> launched;  // [rank][bucket]
  std::vector<double> begun;                  // [bucket], all ranks have launched it and a lane was free
  std::vector<double> reduced;                // [bucket]
  std::vector<double> computed;               // [rank]
  std::vector<double> end;                    // [rank], everything is written back
};

class Replay {
 public:
  explicit Replay(Recorded recorded);

  std::size_t ranks() const noexcept { return recorded_.ready.size(); }
  std::size_t parameters() const noexcept { return recorded_.ready.front().size(); }

  // `bucket_of[p]` is negative for a parameter in no bucket. Times and slowdowns must be finite and not negative.
  // Throws BucketStateError where a bucket has no parameter.
  Replayed run(const std::vector<std::int32_t>& bucket_of, const Costs& costs, const Contention& contention) const;

 private:
  Recorded recorded_;
  std::vector<std::vector<std::size_t>> order_;  // [rank], parameters as they become ready
};

}  // namespace ddp_lab
