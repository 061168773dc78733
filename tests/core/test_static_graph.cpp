#include <cstddef>
#include <vector>

#include "check.h"
#include "reduce/static_graph.h"

using ddp_lab::StaticGraph;
using Arrival = StaticGraph::Arrival;

namespace {

// Parameter 0 fires once, 1 three times, 2 never, and 3 never here but on another rank.
StaticGraph learned() {
  StaticGraph graph(4);
  graph.arm();
  for (const std::size_t parameter : {1, 0, 1, 1}) graph.count(parameter);
  graph.learn([](std::size_t parameter) { return parameter != 2; });
  return graph;
}

}  // namespace

TEST("a parameter is complete when it has fired as often as in the first backward, in each later one") {
  StaticGraph graph = learned();
  CHECK(graph.known());
  for (int backward = 0; backward < 3; ++backward) {
    graph.arm();
    CHECK(graph.arrive(1) == Arrival::kWait);
    CHECK(graph.arrive(0) == Arrival::kComplete);
    CHECK(graph.arrive(1) == Arrival::kWait);
    CHECK(graph.arrive(1) == Arrival::kComplete);
  }
}

TEST("one arrival more than counted is a graph that has changed") {
  StaticGraph graph = learned();
  graph.arm();
  CHECK(graph.arrive(0) == Arrival::kComplete);
  CHECK(graph.arrive(0) == Arrival::kChanged);
  CHECK(graph.arrive(2) == Arrival::kChanged);
}

TEST("what never fired is unused; whether another rank used it is remembered") {
  const StaticGraph graph = learned();
  CHECK((graph.unused() == std::vector<std::size_t>{2, 3}));
  CHECK(graph.used_anywhere(0) && graph.used_anywhere(3));
  CHECK(!graph.used_anywhere(2));
}

TEST("a first backward that did not end is counted anew") {
  StaticGraph graph(1);
  graph.arm();
  graph.count(0);
  graph.arm();
  graph.count(0);
  graph.learn([](std::size_t) { return true; });
  graph.arm();
  CHECK(graph.arrive(0) == Arrival::kComplete);
}

int main() { return check::run(); }
