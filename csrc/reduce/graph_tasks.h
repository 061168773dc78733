// GraphTasks: which of autograd's graph tasks bring the gradients of a backward, and which one ends it.
// Guarded by its owner's mutex. Standard library only.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

namespace ddp_lab {

// [Note: the end of a backward]
// Autograd says when a graph task is over by running the callbacks queued in it, and runs none if the task
// failed. So one is queued in every task that brings gradients (a reentrant backward is a task of its own):
// a task that is still listed at the next forward was ended by an exception, and one that is not, with
// buckets missing, ended without reaching all parameters. Gradients may arrive over several backwards.
//
// The root is the task in which a gradient of forward's outputs was seen, or else the first that brought a gradient:
// nested ones end before it. At its end what has not arrived will not: that is how backwards end that may leave
// parameters out, see Backward::flushes().
//
// [Note: a backward after one that failed]
// Autograd destroys a task that failed, and its callbacks with it: then what such a callback holds is gone. So a new
// backward can tell that the one before it failed, with no forward in between that would have discarded it. If no
// gradient had arrived the new one takes its place: nothing was sent, and the others wait for the first bucket, or have
// failed alike. If gradients had arrived, buckets may have been launched, and nobody on this rank knows whether the
// others have failed at the same place, have failed elsewhere, or wait for the remaining buckets of the broken one.
// Collectives that are launched now could meet those and average gradients of two backwards, so it is an error.
class GraphTasks {
 public:
  // A task brings gradients; `by_output`: one of forward's outputs. True if it is new: a callback is to be queued in
  // it.
  bool enter(int task, bool by_output = false) {
    if (root_ == kNone || (by_output && !root_by_output_)) {
      root_ = task;
      root_by_output_ = by_output;
    }
    if (task == last_) return false;
    last_ = task;
    const auto same = [&](const Task& known) { return known.id == task; };
    if (std::any_of(tasks_.begin(), tasks_.end(), same)) return false;
    tasks_.push_back({task, {}});
    return true;
  }
  // What the callback of the task that is new is to hold, so that failed() can tell.
  std::shared_ptr<void> hold_last() {
    auto held = std::make_shared<char>();
    tasks_.back().alive = held;
    return held;
  }
  // Whether all tasks before this one were destroyed before their end.
  bool failed(int next) const {
    const auto destroyed = [](const Task& task) { return task.alive.expired(); };
    return next != last_ && !tasks_.empty() && std::all_of(tasks_.begin(), tasks_.end(), destroyed);
  }
  // The task is over; true if it was the root.
  bool leave(int task) {
    std::erase_if(tasks_, [&](const Task& known) { return known.id == task; });
    last_ = kNone;
    if (task != root_) return false;
    choose_root();
    return true;
  }

  bool is_root(int task) const noexcept { return task == root_; }
  // Whether no task is under way.
  bool empty() const noexcept { return tasks_.empty(); }
  // A backward begins: the next task is its root.
  void choose_root() noexcept {
    last_ = root_ = kNone;
    root_by_output_ = false;
  }
  // A backward is over, whatever tasks of it go on.
  void clear() noexcept {
    tasks_.clear();
    choose_root();
  }

 private:
  static constexpr int kNone = -1;

  struct Task {
    int id;
    std::weak_ptr<void> alive;  // as long as autograd holds the task
  };

  std::vector<Task> tasks_;  // that have brought gradients and have not reached their end
  int last_ = kNone;
  int root_ = kNone;
  bool root_by_output_ = false;
};

}  // namespace ddp_lab
