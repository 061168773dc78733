#include <string>

#include "check.h"
#include "reduce/phase.h"

using ddp_lab::Phase;

namespace {

// Which questions it answers with yes.
std::string said(const Phase& phase) {
  return std::string(phase.armed() ? "armed " : "") + (phase.in_flight() ? "in_flight " : "") +
         (phase.finalizing() ? "finalizing " : "") + (phase.awaits_caller() ? "awaits_caller " : "");
}

}  // namespace

TEST("a backward is armed, in flight, finalized and over") {
  Phase phase;
  CHECK(said(phase) == "");
  phase.arm();
  CHECK(said(phase) == "armed ");
  phase.run();
  CHECK(said(phase) == "armed in_flight ");
  phase.finalize();
  CHECK(said(phase) == "armed in_flight finalizing ");
  phase.end();
  CHECK(said(phase) == "");
}

TEST("one that the caller ends awaits him until it is over") {
  Phase phase;
  phase.arm();
  phase.run();
  phase.await_caller();
  CHECK(said(phase) == "armed in_flight awaits_caller ");
  phase.finalize();
  CHECK(said(phase) == "armed in_flight finalizing awaits_caller ");
  phase.end();
  CHECK(said(phase) == "");
}

TEST("a gradient starts what is armed, and nothing else") {
  Phase phase;
  phase.run();
  CHECK(said(phase) == "");
  phase.arm();
  phase.run();
  phase.finalize();
  phase.run();
  CHECK(phase.finalizing());
  phase.end();
  phase.arm();
  phase.run();
  phase.await_caller();
  phase.run();
  CHECK(phase.awaits_caller() && !phase.finalizing());
}

TEST("it can be given up at any time, and armed again") {
  Phase phase;
  phase.arm();
  phase.arm();  // a second forward
  phase.end();
  CHECK(!phase.armed());
  phase.arm();
  CHECK(phase.armed() && !phase.in_flight());
}

int main() { return check::run(); }
