#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "reduce/bucket_schedule.h"
#include "reduce/replay.h"

using ddp_lab::BucketStateError;
using ddp_lab::Contention;
using ddp_lab::Costs;
using ddp_lab::Replay;
using ddp_lab::Replayed;

namespace {

// Gradients 1 and 0 at 10 and 20 on each rank, whose backward begins at 5.
Replay two_gradients(std::size_t ranks) {
  return Replay({std::vector<std::vector<double>>(ranks, {20, 10}), std::vector<double>(ranks, 5),
                 std::vector<double>(ranks, 20)});
}

Costs alike(std::size_t buckets, double latency, double transfer) {
  return {std::vector<double>(buckets, 0), std::vector<double>(buckets, latency),
          std::vector<double>(buckets, transfer), std::vector<double>(buckets, 0)};
}

bool near(double a, double b) { return std::abs(a - b) < 0.01; }

}  // namespace

TEST("a bucket begins when all ranks have launched it and the one before it has ended") {
  const Replayed found = two_gradients(2).run({1, 0}, alike(2, 0, 12), {});
  CHECK(near(found.launched[1][0], 15) && near(found.launched[1][1], 25));
  CHECK(near(found.begun[0], 15) && near(found.reduced[0], 27));
  CHECK(near(found.begun[1], 27) && near(found.reduced[1], 39));
  CHECK(near(found.computed[0], 25) && near(found.end[0], 39));
}

TEST("with two lanes transfers share the link, latencies do not") {
  Contention two;
  two.lanes = 2;
  const Replay at_once({{{0, 0}}, {0}, {0}});
  CHECK(near(at_once.run({0, 1}, alike(2, 0, 10), two).end[0], 20));
  CHECK(near(at_once.run({0, 1}, alike(2, 10, 0), two).end[0], 10));
  two.sharing = 0;
  CHECK(near(at_once.run({0, 1}, alike(2, 0, 10), two).end[0], 10));
}

TEST("a collective slows computation down, and computation the collective") {
  Contention both;
  both.compute_slowdown = both.comm_slowdown = 1;
  const Replayed found = two_gradients(1).run({1, 0}, alike(2, 0, 4), both);
  CHECK(near(found.reduced[0], 23));  // 8 for 4, while 4 of the next 10 are computed
  CHECK(near(found.launched[0][1], 29) && near(found.reduced[1], 33));
}

TEST("launches and writing back take the rank's time") {
  Costs costs = alike(2, 0, 1);
  costs.launch = {3, 3};
  costs.write_back = {2, 2};
  const Replayed found = two_gradients(1).run({1, 0}, costs, {});
  CHECK(near(found.launched[0][0], 18) && near(found.launched[0][1], 31));
  CHECK(near(found.computed[0], 31) && near(found.end[0], 35));
}

TEST("parameters in no bucket wait for nobody; without a bucket there is computation alone") {
  const Replayed one = two_gradients(1).run({-1, 0}, alike(1, 0, 1), {});
  CHECK(near(one.reduced[0], 16) && near(one.end[0], 25));
  const Replayed none = two_gradients(1).run({-1, -1}, alike(0, 0, 0), {});
  CHECK(none.reduced.empty() && near(none.end[0], 25));
}

TEST("a bucket without a parameter is refused") {
  CHECK(!check::thrown<BucketStateError>([] { two_gradients(1).run({0, 0}, alike(2, 0, 1), {}); }).empty());
}

int main() { return check::run(); }
