#include "reduce/bucket_schedule.h"

#include <string>

namespace ddp_lab {

namespace {

std::string name(const char* what, std::size_t index) { return std::string(what) + " " + std::to_string(index); }

}  // namespace

const char* to_string(BucketState state) noexcept {
  switch (state) {
    case BucketState::kPending:
      return "pending";
    case BucketState::kReady:
      return "ready";
    case BucketState::kLaunched:
      return "launched";
    case BucketState::kReduced:
      return "reduced";
  }
  return "unknown";
}

BucketSchedule::BucketSchedule(const std::vector<std::vector<std::size_t>>& buckets)
    : launched_(buckets.size()), reduced_(buckets.size()) {
  for (const auto& parameters : buckets) {
    const std::size_t index = buckets_.size();
    if (parameters.empty())
      throw BucketStateError("Empty bucket specified: " + name("bucket", index) + " holds no parameter");
    for (const std::size_t parameter : parameters) {
      if (parameter >= parameters_.size()) parameters_.resize(parameter + 1);
      Parameter& entry = parameters_[parameter];
      if (entry.known) {
        throw BucketStateError(name("parameter", parameter) + " is in " + name("bucket", entry.bucket) + " and in " +
                               name("bucket", index));
      }
      entry.known = true;
      entry.bucket = index;
    }
    buckets_.push_back({parameters, 0, BucketState::kReduced});
  }
}

void BucketSchedule::arm() {
  for (Bucket& bucket : buckets_) {
    bucket.waiting = bucket.parameters.size();
    bucket.state = BucketState::kPending;
  }
  for (Parameter& parameter : parameters_) parameter.ready = false;
  launched_ = 0;
  reduced_ = 0;
}

BucketSchedule::Range BucketSchedule::mark_ready(std::size_t parameter) {
  Parameter& arrived = parameters_[checked_parameter(parameter)];
  Bucket& bucket = buckets_[arrived.bucket];
  if (arrived.ready) {
    throw BucketStateError("the gradient of " + name("parameter", parameter) +
                           " is ready a second time since arm(); its " + name("bucket", arrived.bucket) + " is " +
                           to_string(bucket.state) + " and waits for " + std::to_string(bucket.waiting) + " of " +
                           std::to_string(bucket.parameters.size()) + " gradients");
  }
  arrived.ready = true;
  if (--bucket.waiting > 0) return {launched_, launched_};
  bucket.state = BucketState::kReady;
  Range range{launched_, launched_};
  while (range.end < buckets_.size() && buckets_[range.end].state == BucketState::kReady) {
    buckets_[range.end++].state = BucketState::kLaunched;
  }
  launched_ = range.end;
  return range;
}

void BucketSchedule::mark_reduced(std::size_t bucket) {
  Bucket& reduced = buckets_[checked_bucket(bucket)];
  if (reduced.state != BucketState::kLaunched) {
    throw BucketStateError(name("bucket", bucket) + " can't be reduced: it is " + to_string(reduced.state) + " and " +
                           std::to_string(reduced.waiting) + " of its " + std::to_string(reduced.parameters.size()) +
                           " gradients have not arrived; " + std::to_string(launched_) + " of " +
                           std::to_string(buckets_.size()) + " buckets have been launched");
  }
  reduced.state = BucketState::kReduced;
  ++reduced_;
}

BucketState BucketSchedule::state(std::size_t bucket) const { return buckets_[checked_bucket(bucket)].state; }

std::size_t BucketSchedule::bucket_of(std::size_t parameter) const {
  return parameters_[checked_parameter(parameter)].bucket;
}

std::vector<std::size_t> BucketSchedule::missing() const {
  std::vector<std::size_t> indices;
  for (const Bucket& bucket : buckets_) {
    for (const std::size_t parameter : bucket.parameters) {
      if (!parameters_[parameter].ready) indices.push_back(parameter);
    }
  }
  return indices;
}

std::size_t BucketSchedule::checked_parameter(std::size_t parameter) const {
  if (parameter < parameters_.size() && parameters_[parameter].known) return parameter;
  throw BucketStateError(name("parameter", parameter) + " is in none of the " + std::to_string(buckets_.size()) +
                         " buckets");
}

std::size_t BucketSchedule::checked_bucket(std::size_t bucket) const {
  if (bucket < buckets_.size()) return bucket;
  throw BucketStateError(name("bucket", bucket) + " does not exist: the schedule has " +
                         std::to_string(buckets_.size()) + " buckets");
}

}  // namespace ddp_lab
