// What is known about a graph that is the same in every backward. Guarded by its owner's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp_lab {

// [Note: static graph]
// Some graphs bring a gradient to one parameter several times in one backward (reentrant checkpoints that share a
// layer), so the first arrival does not mean that the gradient is complete. If the user says that the graph never
// changes, the first synchronised backward tells how often each parameter fires: nothing is launched in it until it is
// over. Later backwards wait for these counts, and overlap communication as any other. A parameter that never fired is
// unused for good, and whether another rank uses it was agreed upon in that first backward.
//
// Counts hold for a backward that a forward armed. A second backward of the same forward (see [Note: which backward is
// synchronised]) covers an unknown part of the graph: it is reduced as a whole at its end, like the first.
class StaticGraph {
 public:
  enum class Arrival : std::uint8_t { kWait, kComplete, kChanged };

  explicit StaticGraph(std::size_t parameters) : counts_(parameters), left_(parameters), used_anywhere_(parameters) {}

  bool known() const noexcept { return known_; }
  void arm() { known_ ? void(left_ = counts_) : void(counts_.assign(counts_.size(), 0)); }

  // The first backward: a gradient arrived.
  void count(std::size_t parameter) noexcept { ++counts_[parameter]; }
  // It is over. `used_anywhere(parameter)`: whether a rank used it.
  template <typename Function>
  void learn(Function&& used_anywhere) {
    unused_.clear();
    for (std::size_t p = 0; p < counts_.size(); ++p) {
      used_anywhere_[p] = used_anywhere(p);
      if (counts_[p] == 0) unused_.push_back(p);
    }
    known_ = true;
  }

  // Later backwards: a gradient arrived. kComplete: it was the last of its parameter. kChanged: one more than counted.
  Arrival arrive(std::size_t parameter) noexcept {
    if (left_[parameter] == 0) return Arrival::kChanged;
    return --left_[parameter] == 0 ? Arrival::kComplete : Arrival::kWait;
  }

  const std::vector<std::size_t>& unused() const noexcept { return unused_; }
  bool used_anywhere(std::size_t parameter) const { return used_anywhere_[parameter]; }

 private:
  std::vector<std::uint32_t> counts_;  // by parameter
  std::vector<std::uint32_t> left_;
  std::vector<bool> used_anywhere_;
  std::vector<std::size_t> unused_;
  bool known_ = false;
};

}  // namespace ddp_lab
