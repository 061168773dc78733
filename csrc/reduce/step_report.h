// LastStep: facts about the last synchronised backward that ended.
// Guarded by its own mutex, under which nothing is called. Any thread. Standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace ddp_lab {

// Of one bucket in one backward: host time in ns, 0 if there was none.
struct BucketReport {
  std::int64_t backward_begin = 0, first_ready = 0, ready = 0, launched = 0, reduced = 0, backward_end = 0;
};

// Of one synchronised step: host times in ns, 0 if there was none.
struct StepTimes {
  std::int64_t forward_begin = 0, forward_end = 0, backward_begin = 0, backward_compute_end = 0;
  std::int64_t communication_begin = 0, communication_end = 0;
};

class LastStep {
 public:
  // There are new buckets, of which there is nothing to tell.
  void assign(std::size_t buckets) {
    const Lock lock(mutex_);
    buckets_.assign(buckets, BucketReport{});
  }
  // A backward has ended. `order`: parameters as they became ready; it gets the memory of the order before.
  template <typename Function>
  void write(const StepTimes& times, std::vector<std::size_t>& order, const Function& report_of) {
    const Lock lock(mutex_);
    for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b] = report_of(b);
    order_.swap(order);
    times_ = times;
  }
  void set_order(std::vector<std::size_t> order) {
    const Lock lock(mutex_);
    order_ = std::move(order);
  }
  void set_error(std::string text) {
    const Lock lock(mutex_);
    error_ = std::move(text);
  }

  std::vector<BucketReport> buckets() const { return copy_of(buckets_); }
  std::vector<std::size_t> order() const { return copy_of(order_); }
  StepTimes times() const { return copy_of(times_); }
  std::string error() const { return copy_of(error_); }  // the last one raised; empty: none
  // How many parameters became ready.
  std::size_t ready() const {
    const Lock lock(mutex_);
    return order_.size();
  }

 private:
  using Lock = std::lock_guard<std::mutex>;

  template <typename T>
  T copy_of(const T& told) const {
    const Lock lock(mutex_);
    return told;
  }

  mutable std::mutex mutex_;
  std::vector<BucketReport> buckets_;
  std::vector<std::size_t> order_;
  StepTimes times_;
  std::string error_;
};

}  // namespace ddp_lab
