#include <memory>

#include "check.h"
#include "reduce/graph_tasks.h"

using ddp_lab::GraphTasks;

TEST("a task is new once, and is listed until it leaves") {
  GraphTasks tasks;
  CHECK(tasks.empty());
  CHECK(tasks.enter(3) && !tasks.enter(3));
  CHECK(!tasks.empty());
  CHECK(tasks.leave(3) && tasks.empty());
}

TEST("without an output's gradient the first task is the root, and nested ones end before it") {
  GraphTasks tasks;
  tasks.enter(1);
  CHECK(tasks.enter(2));
  CHECK(!tasks.leave(2) && !tasks.empty());
  CHECK(!tasks.enter(1));  // goes on after the nested one
  CHECK(tasks.is_root(1) && tasks.leave(1));
}

TEST("the first task in which an output's gradient was seen is the root, whoever came before") {
  GraphTasks tasks;
  tasks.enter(2);
  tasks.enter(1, /*by_output=*/true);
  tasks.enter(4, /*by_output=*/true);
  CHECK(!tasks.leave(4) && !tasks.leave(2));
  CHECK(tasks.leave(1));
}

TEST("gradients of one backward may arrive over several, each a root of its own") {
  GraphTasks tasks;
  tasks.enter(1);
  CHECK(tasks.leave(1));
  CHECK(tasks.enter(2) && tasks.leave(2));
}

TEST("a task failed if what its callback holds is gone before it left") {
  GraphTasks tasks;
  CHECK(!tasks.failed(1));
  tasks.enter(1);
  std::shared_ptr<void> held = tasks.hold_last();
  CHECK(!tasks.failed(2));
  held.reset();
  CHECK(tasks.failed(2));
  CHECK(!tasks.failed(1));  // it is running
  tasks.clear();
  CHECK(!tasks.failed(2) && tasks.enter(1));
}

TEST("one living task means that the others may be nested in it") {
  GraphTasks tasks;
  tasks.enter(1);
  const std::shared_ptr<void> held = tasks.hold_last();
  tasks.enter(2);
  tasks.hold_last().reset();
  CHECK(!tasks.failed(3));
}

TEST("a backward that begins gets a new root; what is listed stays listed") {
  GraphTasks tasks;
  tasks.enter(1, /*by_output=*/true);
  tasks.choose_root();
  CHECK(!tasks.is_root(1) && !tasks.empty());
  CHECK(tasks.enter(2) && tasks.leave(2));
}

int main() { return check::run(); }
