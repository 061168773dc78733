// Parameters that a backward does not reach: found in the graph before it, and agreed on between the ranks after it.
// Guarded by Reducer's mutex; while a backward is finalized, by the thread that does it.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "reduce/comm_hook.h"
#include "reduce/static_graph.h"
#include "reduce/warnings.h"

namespace ddp_lab {

// [Note: unused parameters]
// A bucket waits for all its gradients, so a parameter that takes no part in the loss would keep its bucket, and the
// other ranks, waiting forever. With find_unused_parameters two things happen:
//
// 1. GraphWalk, at the end of each forward: the accumulators that can't be reached from forward's outputs belong to
//    unused parameters. They count as arrived when the backward begins, so that their buckets start early. What was
//    reached and yet brings nothing (an output that the loss ignores) counts as arrived at the end of the backward.
// 2. UsedMap, at the end of each backward: one number a parameter, 1 if a gradient arrived here since the last
//    synchronised backward (so also under no_sync), summed over the ranks. Where the sum is 0 no rank used the
//    parameter, and its gradient is left as it is: an optimizer must not take a step for it because of zeros that we
//    made up. Who used a parameter itself knows the answer, so a rank waits for the sum only at its first unused one.
class GraphWalk {
 public:
  // `accumulators[p]`: the node that accumulates the gradient of parameter p; kept alive by the caller.
  explicit GraphWalk(const std::vector<const torch::autograd::Node*>& accumulators);

  // Parameters that the graph of `outputs` does not reach, ascending. Stops as soon as all have been reached.
  void find_unused(const std::vector<at::Tensor>& outputs, std::vector<std::size_t>& unused);

 private:
  // An open-addressed set of pointers; emptied by a new round, not by writing. Nothing is allocated once it has grown.
  class Visited {
   public:
    void start();
    bool insert(const torch::autograd::Node* node);  // false if it was there

   private:
    struct Entry {
      const torch::autograd::Node* node = nullptr;
      std::uint32_t round = 0;
    };
    void grow();
    std::vector<Entry> entries_ = std::vector<Entry>(1024);
    std::size_t size_ = 0;
    std::uint32_t round_ = 0;
  };

  std::vector<std::pair<const torch::autograd::Node*, std::size_t>> accumulators_;  // sorted
  std::vector<std::uint8_t> reached_;
  std::vector<torch::autograd::Node*> stack_;
  Visited visited_;
  std::size_t parameters_ = 0;
};

class UsedMap {
 public:
  UsedMap(std::size_t parameters, c10::Device device) : here_(parameters, 0), device_(device) {}

  void mark(std::size_t parameter) noexcept { here_[parameter] = 1; }
  bool here(std::size_t parameter) const noexcept { return here_[parameter] != 0; }

  // Starts the sum over the ranks. Every rank calls it at the same place in its sequence of collectives.
  void start(c10d::ProcessGroup& group);
  bool started() const noexcept { return started_; }
  // Whether a rank used the parameter since reset(). Waits if it is not known here.
  bool anywhere(std::size_t parameter);
  // A synchronised backward is over: nothing has been used since.
  void reset() noexcept;
  // The sum is given up: its work may never complete.
  void abandon();

  // By parameter: how many ranks used it, as of the last sum; zeros before the first. int32, on the model's device.
  at::Tensor tensor();

 private:
  void wait();

  std::vector<std::uint8_t> here_;
  c10::Device device_;
  at::Tensor sum_;   // what the collective works on
  at::Tensor host_;  // its result on the CPU
  Launched sum_in_flight_;
  bool started_ = false;  // in this backward
  bool waited_ = true;
};

// What a model knows of its unused parameters, from its graph, its ranks and earlier backwards.
class ParameterUse {
 public:
  ParameterUse(std::size_t parameters, c10::Device device) : here(parameters, device), parameters_(parameters) {}

  // Each forward's graph is to be searched.
  void search(const std::vector<const torch::autograd::Node*>& accumulators) {
    walk_ = std::make_unique<GraphWalk>(accumulators);
  }
  void stop_search() { walk_.reset(); }
  bool searches() const noexcept { return walk_ && !static_; }
  // Whether the last forward returned tensors that could be searched.
  bool searched() const noexcept { return searched_; }

  void set_static_graph() {
    if (!static_) static_ = std::make_unique<StaticGraph>(parameters_);
  }
  StaticGraph* static_graph() const noexcept { return static_.get(); }

  // `unused`: empty before; those of the backward of these outputs, ascending, as far as one knows before it.
  void find_unused(const std::vector<at::Tensor>& outputs, std::vector<std::size_t>& unused, Warnings& warnings);
  // Of the last forward.
  const std::vector<std::size_t>& last_unused() const { return static_ ? static_->unused() : last_unused_; }
  // Whether each forward has left the same parameters unused.
  bool always_same() const noexcept { return same_; }

  // Whether no rank used it, as far as it matters. `counted`: with a static graph that is known.
  bool unused_anywhere(std::size_t parameter, bool counted) {
    if (here.started()) return !here.anywhere(parameter);
    return counted && !static_->used_anywhere(parameter);
  }
  // The first backward of a static graph is over; `shadow`: it was the other ranks'.
  void learn(bool shadow);

  UsedMap here;

 private:
  const std::size_t parameters_;
  std::unique_ptr<GraphWalk> walk_;      // find_unused_parameters
  std::unique_ptr<StaticGraph> static_;  // static_graph
  std::vector<std::size_t> last_unused_;
  bool same_ = true;
  bool walked_ = false;
  bool searched_ = true;
};

}  // namespace ddp_lab
