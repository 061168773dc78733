#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "reduce/bucket_schedule.h"

using ddp_lab::BucketSchedule;
using ddp_lab::BucketState;
using ddp_lab::BucketStateError;

namespace {

template <typename Call>
bool says(const std::string& message, Call call) {
  return check::thrown<BucketStateError>(call) == message;
}

}  // namespace

TEST("every order of arrival launches the buckets in bucket order, each once, as early as that order allows") {
  const std::vector<std::vector<std::size_t>> buckets = {{5, 2}, {0}, {4, 1, 3}};
  BucketSchedule schedule(buckets);
  std::vector<std::size_t> order(6);
  std::iota(order.begin(), order.end(), 0);
  do {
    schedule.arm();
    std::vector<bool> arrived(order.size());
    std::size_t expected = 0;  // launched up to here
    for (const std::size_t parameter : order) {
      const BucketSchedule::Range now = schedule.mark_ready(parameter);
      arrived[parameter] = true;
      CHECK(now.begin == expected);
      const auto complete = [&](std::size_t b) {
        return std::all_of(buckets[b].begin(), buckets[b].end(), [&](std::size_t p) { return arrived[p]; });
      };
      while (expected < buckets.size() && complete(expected)) ++expected;
      CHECK(now.end == expected);
      CHECK(schedule.launched() == expected);
    }
    CHECK(schedule.all_launched());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST("a bucket is pending, ready, launched, reduced in this order") {
  BucketSchedule schedule({{0}, {1}});
  schedule.arm();
  CHECK(schedule.state(1) == BucketState::kPending);
  CHECK(schedule.mark_ready(1).empty());
  CHECK(schedule.state(1) == BucketState::kReady);
  const BucketSchedule::Range both = schedule.mark_ready(0);
  CHECK(both.begin == 0 && both.end == 2);
  CHECK(schedule.state(0) == BucketState::kLaunched && schedule.state(1) == BucketState::kLaunched);
  schedule.mark_reduced(1);  // collectives may complete in another order
  CHECK(schedule.state(1) == BucketState::kReduced && !schedule.finished());
  schedule.mark_reduced(0);
  CHECK(schedule.finished());
}

TEST("before the first arm() a schedule is finished and takes no gradient") {
  BucketSchedule schedule({{0}, {1}});
  CHECK(schedule.finished() && schedule.missing().empty() && schedule.state(1) == BucketState::kReduced);
  CHECK(
      says("the gradient of parameter 0 is ready a second time since arm(); its bucket 0 is reduced and waits for 0 of "
           "1 gradients",
           [&] { schedule.mark_ready(0); }));
}

TEST("arm() in the middle of a backward discards it") {
  BucketSchedule schedule({{0}, {1, 2}});
  schedule.arm();
  schedule.mark_ready(0);
  schedule.mark_ready(2);
  schedule.arm();
  CHECK((schedule.missing() == std::vector<std::size_t>{0, 1, 2}));
  CHECK(schedule.launched() == 0 && schedule.state(0) == BucketState::kPending);
  CHECK(schedule.mark_ready(0).end == 1);
}

TEST("missing() names the parameters without a gradient, in bucket order") {
  BucketSchedule schedule({{7, 3}, {1}});
  schedule.arm();
  schedule.mark_ready(3);
  CHECK((schedule.missing() == std::vector<std::size_t>{7, 1}));
  CHECK(schedule.bucket_of(7) == 0 && schedule.bucket_of(1) == 1);
}

TEST("an impossible transition says which parameter or bucket, and in which state it is") {
  BucketSchedule schedule({{0, 2}, {3}});
  schedule.arm();
  schedule.mark_ready(2);
  CHECK(
      says("the gradient of parameter 2 is ready a second time since arm(); its bucket 0 is pending and waits for 1 of "
           "2 gradients",
           [&] { schedule.mark_ready(2); }));
  CHECK(says("parameter 1 is in none of the 2 buckets", [&] { schedule.mark_ready(1); }));
  CHECK(says("parameter 4 is in none of the 2 buckets", [&] { schedule.mark_ready(4); }));
  CHECK(
      says("bucket 0 can't be reduced: it is pending and 1 of its 2 gradients have not arrived; 0 of 2 buckets have "
           "been launched",
           [&] { schedule.mark_reduced(0); }));
  CHECK(says("bucket 2 does not exist: the schedule has 2 buckets", [&] { schedule.mark_reduced(2); }));
  schedule.mark_ready(0);
  schedule.mark_reduced(0);
  CHECK(
      says("bucket 0 can't be reduced: it is reduced and 0 of its 2 gradients have not arrived; 1 of 2 buckets have "
           "been launched",
           [&] { schedule.mark_reduced(0); }));
  CHECK(to_string(BucketState::kReady) == std::string_view("ready"));
  CHECK(to_string(BucketState::kLaunched) == std::string_view("launched"));
}

TEST("a refused transition changes nothing") {
  BucketSchedule schedule({{0, 1}, {2}});
  schedule.arm();
  schedule.mark_ready(0);
  check::thrown<BucketStateError>([&] { schedule.mark_ready(0); });
  check::thrown<BucketStateError>([&] { schedule.mark_reduced(0); });
  CHECK((schedule.missing() == std::vector<std::size_t>{1, 2}));
  CHECK(schedule.mark_ready(1).end == 1);
}

TEST("a bucket without parameters and a parameter in two buckets are refused") {
  CHECK(says("Empty bucket specified: bucket 1 holds no parameter", [] { BucketSchedule({{0}, {}}); }));
  CHECK(says("parameter 4 is in bucket 0 and in bucket 1", [] { BucketSchedule({{4}, {1, 4}}); }));
}

TEST("a model without buckets is finished at once") {
  BucketSchedule schedule(std::vector<std::vector<std::size_t>>{});
  schedule.arm();
  CHECK(schedule.finished() && schedule.all_launched());
}

int main() { return check::run(); }
