#include "reduce/bucket_set.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace ddp_lab {
namespace {

std::vector<at::Tensor> gradients_of(const Bucket& bucket) {
  std::vector<at::Tensor> gradients;
  for (const Slot& slot : bucket.slots()) gradients.push_back(slot.variable.grad());
  return gradients;
}

}  // namespace

BucketSet::BucketSet(const Assignment& assignment, const std::vector<at::Tensor>& parameters,
                     const ReducerOptions& options, const Reduction& reduction)
    : parameters_(parameters), options_(options), reduction_(reduction) {
  TORCH_CHECK(parameters.size() == options.names.size(), "every parameter needs a name");
  assign(assignment);
  for (const auto& bucket : buckets_) spans_.add(bucket->device());
}

std::unique_ptr<Bucket> BucketSet::make(const std::vector<std::size_t>& indices) const {
  BucketOptions options;
  if (!indices.empty() && parameters_.at(indices.front()).is_floating_point()) options.dtype = options_.dtype;
  options.batched = options_.batched_grad_copy;
  options.lazy = options_.lazy_bucket_allocation;
  options.notices = notices_;
  const bool on_cpu = !indices.empty() && parameters_.at(indices.front()).is_cpu();
  if (on_cpu && !options.lazy) options.make_buffer = reduction_.cpu_memory();
  std::vector<at::Tensor> variables;
  for (const std::size_t index : indices) {
    options.sparse = options.sparse || (index < options_.expect_sparse.size() && options_.expect_sparse[index]);
    variables.push_back(parameters_[index]);
    options.names.push_back(options_.names[index]);
  }
  auto bucket = std::make_unique<Bucket>(indices, variables, std::move(options));
  tell_known_rows(*bucket);
  return bucket;
}

std::vector<BucketSet::Place> BucketSet::places_of(const Assignment& assignment) const {
  std::vector<Place> places(parameters_.size());
  std::size_t placed = 0;
  for (std::size_t b = 0; b < assignment.size(); ++b) {
    for (std::size_t slot = 0; slot < assignment[b].size(); ++slot) {
      const std::size_t index = assignment[b][slot];
      TORCH_CHECK(index < parameters_.size(), "there is no parameter ", index);
      places[index].bucket = static_cast<std::uint32_t>(b);
      places[index].slot = static_cast<std::uint32_t>(slot);
      places[index].bytes = static_cast<std::int64_t>(parameters_[index].nbytes());
      ++placed;
    }
  }
  TORCH_CHECK(placed == parameters_.size(), "every parameter must be in a bucket");
  return places;
}

// The new buckets take the memory of the old ones: these are let go first, and where gradients are their views, each
// buffer goes with the last of them.
BucketSchedule BucketSet::assign(const Assignment& assignment) {
  BucketSchedule schedule(assignment);  // refuses empty buckets and parameters in two buckets
  std::vector<Place> places = places_of(assignment);
  const at::NoGradGuard no_grad;
  std::vector<bool> was_view(parameters_.size(), false);
  for (std::size_t i = 0; !buckets_.empty() && i < parameters_.size(); ++i) {
    was_view[i] = of(i).is_view(places_[i].slot, parameters_[i].grad());
  }
  buckets_.clear();
  for (const auto& indices : assignment) {
    buckets_.push_back(make(indices));
    for (const Slot& slot : buckets_.back()->slots()) {
      if (!was_view[slot.parameter]) continue;
      at::Tensor& gradient = parameters_[slot.parameter].mutable_grad();
      slot.view.copy_(gradient);
      gradient = slot.view;
    }
  }
  places_ = std::move(places);
  return schedule;
}

BucketSet::Assignment BucketSet::assignment() const {
  Assignment found;
  for (const auto& bucket : buckets_) {
    found.emplace_back();
    for (const Slot& slot : bucket->slots()) found.back().push_back(slot.parameter);
  }
  return found;
}

void BucketSet::set_sparse_metadata(const std::map<std::string, at::Tensor>& metadata) {
  sparse_metadata_ = metadata;
  for (const auto& bucket : buckets_) tell_known_rows(*bucket);
}

void BucketSet::tell_known_rows(Bucket& bucket) const {
  if (!bucket.sparse()) return;
  if (sparse_metadata_.empty()) return bucket.set_known_rows(at::Tensor());
  const std::string& name = bucket.slots().front().name;
  auto found = sparse_metadata_.find(name);
  if (found == sparse_metadata_.end()) found = sparse_metadata_.find("." + name);  // torch's name in the root
  TORCH_CHECK(found != sparse_metadata_.end(), "param: ", name,
              " not found in sparse metadata: _set_sparse_metadata needs the rows of every sparse parameter");
  bucket.set_known_rows(found->second);
}

bool BucketSet::on_cpu() const {
  return std::all_of(begin(), end(), [](const auto& bucket) { return bucket->device().is_cpu(); });
}

void BucketSet::arm() {
  for (const auto& bucket : buckets_) bucket->times = std::make_shared<BucketTimes>();
  spans_.anchor();
}

void BucketSet::abandon(std::size_t launched) {
  for (std::size_t b = 0; b < launched; ++b) buckets_[b]->renew();
  spans_.forget();
  for (const auto& bucket : buckets_) bucket->release();
}

bool BucketSet::release_lazy() {
  if (!options_.lazy_bucket_allocation) return false;
  for (const auto& bucket : buckets_) bucket->release();
  return true;
}

std::optional<std::vector<std::vector<at::Tensor>>> BucketSet::averages(std::int64_t step) const {
  std::vector<std::vector<at::Tensor>> found;
  for (const auto& bucket : buckets_) {
    found.push_back(bucket->averages(step));
    if (found.back().empty()) return std::nullopt;
  }
  return found;
}

Inspections BucketSet::inspect_gradients() const {
  Inspections found;
  for (const auto& bucket : buckets_) found.push_back(ddp_lab::inspect(gradients_of(*bucket)));
  return found;
}

Inspections BucketSet::inspect(std::int64_t step) const {
  Inspections found;
  for (const auto& bucket : buckets_) {
    const std::vector<at::Tensor> averages = bucket->averages(step);
    found.push_back(ddp_lab::inspect(averages.empty() ? gradients_of(*bucket) : averages));
  }
  return found;
}

BucketSet::Zeros::Zeros(BucketSet& set) : set_(set) {
  for (const std::vector<std::size_t>& indices : set.assignment()) {
    own_.push_back(set.make(indices));
    own_.back()->fill_zero();
  }
  set_.buckets_.swap(own_);
}

}  // namespace ddp_lab
