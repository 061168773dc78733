// BucketSet: one assignment of a model's parameters to buckets, replaced as a whole.
// Guarded by Reducer's mutex; while a backward is finalized, the buckets belong to the thread that does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reduce/bucket.h"
#include "reduce/bucket_schedule.h"
#include "reduce/device_spans.h"
#include "reduce/inspection.h"
#include "reduce/reduction.h"

namespace ddp_lab {

// What a reducer is made with.
struct ReducerOptions {
  std::vector<std::string> names;  // qualified, in the order of registration
  std::string module;              // what messages call the user's module
  bool gradient_as_bucket_view = false;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool skip_all_reduce_unused_params = false;  // the user answers for equal unused parameters on all ranks
  bool batched_grad_copy = false;
  bool lazy_bucket_allocation = false;  // see [Note: buffers on demand]
  std::vector<bool> expect_sparse;      // by parameter; empty: none
  std::optional<at::ScalarType> dtype;  // of the gradients, if not the parameters' (mixed precision)
  // By parameter: an optimizer runs as soon as its gradient is averaged and drops it, so that an absent one stays
  // absent.
  std::vector<bool> optimized;  // empty: none
};

class BucketSet {
 public:
  // assignment[b]: the parameters of bucket b, as indices in the order of registration.
  using Assignment = std::vector<std::vector<std::size_t>>;

  struct Place {
    std::uint32_t bucket = 0;
    std::uint32_t slot = 0;
    std::int64_t bytes = 0;
  };

  // Keeps references to the last three.
  BucketSet(const Assignment& assignment, const std::vector<at::Tensor>& parameters, const ReducerOptions& options,
            const Reduction& reduction);

  // Returns the schedule of the new buckets. Gradients that were views become views of those.
  BucketSchedule assign(const Assignment& assignment);
  Assignment assignment() const;
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& metadata);

  std::size_t size() const noexcept { return buckets_.size(); }
  Bucket& operator[](std::size_t index) const { return *buckets_[index]; }
  auto begin() const { return buckets_.begin(); }
  auto end() const { return buckets_.end(); }
  const Place& place(std::size_t parameter) const { return places_[parameter]; }
  Bucket& of(std::size_t parameter) const { return *buckets_[places_[parameter].bucket]; }
  bool on_cpu() const;
  Notices& notices() const { return *notices_; }

  // A backward is to come.
  void arm();
  // A backward was given up in which buckets [0, launched) were launched.
  void abandon(std::size_t launched);
  // Lets go of the buffers if that is wanted, see [Note: buffers on demand]. False: it is not.
  bool release_lazy();
  std::shared_ptr<DeviceSpans::Span> begin_span(const Bucket& bucket, const Event& launch) {
    return spans_.begin(bucket.device(), launch);
  }

  // What the buckets averaged in `step`, if all of it is still there.
  std::optional<std::vector<std::vector<at::Tensor>>> averages(std::int64_t step) const;
  Inspections inspect_gradients() const;
  // The averages where they are still there.
  Inspections inspect(std::int64_t step) const;

  // Buckets of zeros in place of the set's, as long as it lives: what a rank that has joined contributes.
  class Zeros {
   public:
    explicit Zeros(BucketSet& set);
    ~Zeros() { set_.buckets_.swap(own_); }
    Zeros(const Zeros&) = delete;
    Zeros& operator=(const Zeros&) = delete;

   private:
    BucketSet& set_;
    std::vector<std::unique_ptr<Bucket>> own_;
  };

  bool rebuilt = false;  // in the order in which gradients became ready

 private:
  std::unique_ptr<Bucket> make(const std::vector<std::size_t>& indices) const;
  std::vector<Place> places_of(const Assignment& assignment) const;
  void tell_known_rows(Bucket& bucket) const;

  const std::vector<at::Tensor>& parameters_;
  const ReducerOptions& options_;
  const Reduction& reduction_;
  const std::shared_ptr<Notices> notices_ = std::make_shared<Notices>();
  std::map<std::string, at::Tensor> sparse_metadata_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<Place> places_;  // by parameter
  ModelSpans spans_;
};

}  // namespace ddp_lab
