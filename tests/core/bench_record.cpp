// Prints what one event costs: `make bench-record`.
#include <cstdio>

#include "record/recorder.h"

int main() {
  constexpr int kRounds = 501;
  std::printf("recording on:  %5.1f ns per event (median of %d rounds of 20,000; at most 40 wanted)\n",
              ddp_lab::measure_ns_per_event(true, kRounds), kRounds);
  std::printf("recording off: %5.1f ns per event\n", ddp_lab::measure_ns_per_event(false, kRounds));
}
