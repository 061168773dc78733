#include "reduce/unused_parameters.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "reduce/messages.h"

namespace ddp_lab {

using torch::autograd::Node;

void GraphWalk::Visited::start() {
  size_ = 0;
  if (++round_ != 0) return;
  std::fill(entries_.begin(), entries_.end(), Entry{});
  round_ = 1;
}

bool GraphWalk::Visited::insert(const Node* node) {
  if (2 * size_ >= entries_.size()) grow();
  const std::size_t mask = entries_.size() - 1;
  const auto key = reinterpret_cast<std::uintptr_t>(node);
  std::size_t at = static_cast<std::size_t>((key >> 4) * 0x9E3779B97F4A7C15ULL >> 20) & mask;
  for (; entries_[at].round == round_; at = (at + 1) & mask) {
    if (entries_[at].node == node) return false;
  }
  entries_[at] = {node, round_};
  ++size_;
  return true;
}

void GraphWalk::Visited::grow() {
  std::vector<Entry> old(entries_.size() * 2);
  old.swap(entries_);
  size_ = 0;
  for (const Entry& entry : old) {
    if (entry.round == round_) insert(entry.node);
  }
}

GraphWalk::GraphWalk(const std::vector<const Node*>& accumulators)
    : reached_(accumulators.size()), parameters_(accumulators.size()) {
  for (std::size_t i = 0; i < accumulators.size(); ++i) accumulators_.emplace_back(accumulators[i], i);
  std::sort(accumulators_.begin(), accumulators_.end());
}

void GraphWalk::find_unused(const std::vector<at::Tensor>& outputs, std::vector<std::size_t>& unused) {
  unused.clear();
  visited_.start();
  stack_.clear();
  std::fill(reached_.begin(), reached_.end(), 0);
  std::size_t missing = parameters_;
  const auto visit = [&](Node* node) {
    if (node == nullptr || !visited_.insert(node)) return;
    if (node->num_outputs() > 0) {
      stack_.push_back(node);
      return;
    }
    const auto found = std::lower_bound(accumulators_.begin(), accumulators_.end(),
                                        std::make_pair(static_cast<const Node*>(node), std::size_t{0}));
    if (found == accumulators_.end() || found->first != node) return;
    reached_[found->second] = 1;
    --missing;
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!stack_.empty() && missing > 0) {
    const Node* node = stack_.back();
    stack_.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  for (std::size_t p = 0; missing > 0 && p < parameters_; ++p) {
    if (!reached_[p]) unused.push_back(p);
  }
}

void UsedMap::start(c10d::ProcessGroup& group) {
  wait();
  const auto size = static_cast<std::int64_t>(here_.size());
  host_ = at::empty({size}, at::kInt);
  std::copy(here_.begin(), here_.end(), host_.mutable_data_ptr<std::int32_t>());
  sum_ = host_.to(device_);
  sum_in_flight_ = start_all_reduce(group, sum_);
  started_ = true;
  waited_ = false;
}

void UsedMap::wait() {
  if (waited_) return;
  sum_ = finish(sum_in_flight_, sum_);
  host_ = sum_.to(at::kCPU);
  waited_ = true;
}

bool UsedMap::anywhere(std::size_t parameter) {
  if (here_[parameter]) return true;
  wait();
  return host_.const_data_ptr<std::int32_t>()[parameter] != 0;
}

void UsedMap::reset() noexcept {
  std::fill(here_.begin(), here_.end(), 0);
  started_ = false;
}

void UsedMap::abandon() {
  reset();
  if (waited_) return;
  sum_in_flight_ = Launched{};
  sum_ = at::Tensor();
  waited_ = true;
}

at::Tensor UsedMap::tensor() {
  wait();
  if (!sum_.defined()) sum_ = at::zeros({static_cast<std::int64_t>(here_.size())}, at::kInt).to(device_);
  return sum_;
}

void ParameterUse::find_unused(const std::vector<at::Tensor>& outputs, std::vector<std::size_t>& unused,
                               Warnings& warnings) {
  if (static_ && static_->known()) unused = static_->unused();
  if (!searches()) return;
  const auto in_graph = [](const at::Tensor& output) { return output.defined() && output.requires_grad(); };
  // None found: they may be inside objects that can't be searched. Then the end of the backward tells.
  searched_ = std::any_of(outputs.begin(), outputs.end(), in_graph);
  if (!searched_) return;
  RECORD_FUNCTION("ddp_lab::search_unused_parameters", std::vector<c10::IValue>());
  walk_->find_unused(outputs, unused);
  if (!walked_ && unused.empty()) warnings.add(messages::needless_walk());
  same_ = same_ && (!walked_ || unused == last_unused_);
  last_unused_ = unused;
  walked_ = true;
}

void ParameterUse::learn(bool shadow) {
  const auto used = [this](std::size_t parameter) { return !unused_anywhere(parameter, /*counted=*/false); };
  // A rank that joins before it had a backward learns from the others', taking each parameter to fire once.
  for (std::size_t p = 0; shadow && p < parameters_; ++p) {
    if (used(p)) static_->count(p);
  }
  static_->learn(used);
}

}  // namespace ddp_lab
