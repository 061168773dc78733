#include "reduce/replay.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "reduce/bucket_schedule.h"

namespace ddp_lab {

namespace {

// One rank: what it still has to compute until its next launch, or until the end.
struct Rank {
  std::vector<double> points;  // launches by bucket, then the end; in ns of computation since its begin of backward
  std::size_t next = 0;        // in points
  double position = 0;         // since its begin of backward, negative before

  bool computes() const { return next < points.size(); }
  double left() const { return points[next] - position; }
};

struct Collective {
  std::size_t bucket;
  double latency;
  double transfer;
  double share = 1;  // rate of the transfer beside others
};

// Where in each rank's computation the buckets are launched: what BucketSchedule says.
Rank launches(BucketSchedule& schedule, const std::vector<std::size_t>& order, const std::vector<double>& ready,
              double computed, const std::vector<std::int32_t>& bucket_of, const std::vector<double>& costs) {
  Rank rank;
  rank.points.reserve(costs.size() + 1);
  double added = 0;
  schedule.arm();
  for (const std::size_t parameter : order) {
    if (bucket_of[parameter] < 0) continue;
    const BucketSchedule::Range range = schedule.mark_ready(parameter);
    for (std::size_t bucket = range.begin; bucket < range.end; ++bucket) {
      added += costs[bucket];
      rank.points.push_back(ready[parameter] + added);
    }
  }
  rank.points.push_back(std::max(computed + added, rank.points.empty() ? 0.0 : rank.points.back()));
  return rank;
}

// All ranks and the link between them, from event to event.
class Simulation {
 public:
  Simulation(std::vector<Rank> ranks, const Costs& costs, const Contention& contention)
      : ranks_(std::move(ranks)), costs_(costs), contention_(contention), missing_(buckets(), ranks_.size()) {
    found_.launched.assign(ranks_.size(), std::vector<double>(buckets(), 0));
    found_.begun.assign(buckets(), 0);
    found_.reduced.assign(buckets(), 0);
    found_.computed.assign(ranks_.size(), 0);
    computing_ = ranks_.size();
  }

  Replayed run() {
    while (computing_ > 0 || begun_ < buckets() || !active_.empty()) step();
    write_back();
    return std::move(found_);
  }

 private:
  std::size_t buckets() const { return costs_.latency.size(); }

  double compute_rate() const { return active_.empty() ? 1 : 1 / (1 + contention_.compute_slowdown); }

  double comm_rate() const {
    const double share = static_cast<double>(computing_) / static_cast<double>(ranks_.size());
    return 1 / (1 + share * contention_.comm_slowdown);
  }

  // To the next event, and what happens there.
  void step() {
    begin_collectives();
    const double compute = compute_rate(), comm = comm_rate();
    double until = std::numeric_limits<double>::infinity();
    for (const Rank& rank : ranks_) {
      if (rank.computes()) until = std::min(until, rank.left() / compute);
    }
    for (const Collective& one : active_) until = std::min(until, left(one) / comm);
    now_ += until;
    for (std::size_t r = 0; r < ranks_.size(); ++r) advance(r, until, compute);
    for (Collective& one : active_) {
      (one.latency > 0 ? one.latency : one.transfer) -= until * comm * (one.latency > 0 ? 1 : one.share);
    }
    end_collectives();
  }

  // Of its present phase.
  static double left(const Collective& one) { return one.latency > 0 ? one.latency : one.transfer / one.share; }

  void advance(std::size_t r, double elapsed, double rate) {
    Rank& rank = ranks_[r];
    if (!rank.computes()) return;
    rank.position += elapsed * rate;
    while (rank.computes() && rank.left() <= kInstant) {
      rank.position = rank.points[rank.next];
      if (rank.next < buckets()) {
        found_.launched[r][rank.next] = now_;
        --missing_[rank.next];
      } else {
        found_.computed[r] = now_;
        --computing_;
      }
      ++rank.next;
    }
  }

  void begin_collectives() {
    while (begun_ < buckets() && missing_[begun_] == 0 && active_.size() < contention_.lanes) {
      found_.begun[begun_] = now_;
      active_.push_back({begun_, costs_.latency[begun_], costs_.transfer[begun_]});
      ++begun_;
    }
    share();
  }

  void end_collectives() {
    for (Collective& one : active_) {
      if (one.latency > 0 && one.latency <= kInstant) one.latency = 0;
      if (one.latency <= 0 && one.transfer <= kInstant) found_.reduced[one.bucket] = now_;
    }
    std::erase_if(active_, [](const Collective& one) { return one.latency <= 0 && one.transfer <= kInstant; });
  }

  void share() {
    const auto transfers =
        std::count_if(active_.begin(), active_.end(), [](const auto& one) { return one.latency <= 0; });
    for (Collective& one : active_) {
      one.share = 1 / (1 + static_cast<double>(std::max<std::ptrdiff_t>(transfers - 1, 0)) * contention_.sharing);
    }
  }

  void write_back() {
    for (const double computed : found_.computed) {
      double now = computed;
      for (std::size_t b = 0; b < buckets(); ++b) now = std::max(now, found_.reduced[b]) + costs_.write_back[b];
      found_.end.push_back(now);
    }
  }

  static constexpr double kInstant = 1e-3;  // ns: rounding, not time

  std::vector<Rank> ranks_;
  const Costs& costs_;
  const Contention& contention_;
  std::vector<std::size_t> missing_;  // ranks that have not launched the bucket
  std::vector<Collective> active_;
  std::size_t computing_ = 0;  // ranks
  std::size_t begun_ = 0;      // collectives
  double now_ = 0;
  Replayed found_;
};

}  // namespace

Replay::Replay(Recorded recorded) : recorded_(std::move(recorded)) {
  for (const std::vector<double>& ready : recorded_.ready) {
    std::vector<std::size_t> order(ready.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ready[a] < ready[b]; });
    order_.push_back(std::move(order));
  }
}

Replayed Replay::run(const std::vector<std::int32_t>& bucket_of, const Costs& costs,
                     const Contention& contention) const {
  std::vector<std::vector<std::size_t>> buckets(costs.latency.size());
  for (std::size_t p = 0; p < bucket_of.size(); ++p) {
    if (bucket_of[p] >= 0) buckets.at(static_cast<std::size_t>(bucket_of[p])).push_back(p);
  }
  BucketSchedule schedule(buckets);
  std::vector<Rank> ranks;
  for (std::size_t r = 0; r < recorded_.ready.size(); ++r) {
    ranks.push_back(launches(schedule, order_[r], recorded_.ready[r], recorded_.computed[r], bucket_of, costs.launch));
    ranks.back().position = -recorded_.begin[r];
  }
  return Simulation(std::move(ranks), costs, contention).run();
}

}  // namespace ddp_lab
