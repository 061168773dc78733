#include "record/cost.h"

#include <algorithm>
#include <vector>

#include "record/recorder.h"

namespace ddp_lab {

double measure_ns_per_event(bool enabled, int rounds) {
  constexpr int kEvents = 20'000;
  Recorder recorder;
  recorder.enable(enabled);
  std::vector<double> costs;
  for (int round = 0; round < rounds; ++round) {
    Event event;
    event.kind = Kind::kGradReady;
    const std::int64_t begin = now_ns();
    for (event.parameter = 0; event.parameter < kEvents; ++event.parameter) recorder.record(event);
    costs.push_back(static_cast<double>(now_ns() - begin) / kEvents);
  }
  std::nth_element(costs.begin(), costs.begin() + rounds / 2, costs.end());
  return costs[rounds / 2];
}

}  // namespace ddp_lab
