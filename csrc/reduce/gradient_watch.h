// What the gradients of each bucket measure before and after they are averaged, and where one is not finite first.
// Guarded by Reducer's mutex; while a backward is finalized, it belongs to the thread that does it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reduce/bucket.h"

namespace ddp_lab {

// [Note: watching gradients]
// A bucket's buffer holds this rank's own gradients from the last copy-in to the launch, and the average from the end
// of its collective on: the norms are taken there, of whole buffers. A sum of squares is finite if all its terms are,
// so looking for NaN and Inf costs nothing more; only when one is found the bucket's gradients are looked at one by
// one. On a device the norms of the single gradients are computed in one go, stay there, and are read at the end of the
// backward, the only place where the host waits for them.
// Then, with the reducer's mutex released, the callback compares them with the other ranks'. It is called on every rank
// in the same steps: it may communicate.
class GradientWatch {
 public:
  struct Found {
    std::vector<double> before;   // Euclidean norm by bucket: this rank's gradients; NaN if it brought none
    std::vector<double> after;    // of their average; NaN if it was not sent
    std::int64_t parameter = -1;  // the first, in the order of readiness, whose own gradient is not finite
    std::int64_t position = -1;   // its place in that order
    bool nan = false;             // it holds a NaN; else it holds infinities
    std::int64_t parameters = 0;  // how many have such a gradient
    std::int64_t host_ns = 0;     // what all this took of the host's time
  };
  // What it returns is raised as an error of the backward, unless it is empty.
  using Callback = std::function<std::string(std::int64_t step, const Found&)>;

  GradientWatch(std::int64_t every, Callback callback) : every_(every), callback_(std::move(callback)) {}

  bool due(std::int64_t step) const noexcept { return step % every_ == 0; }
  // Of a new backward.
  void begin(std::size_t buckets);
  // `buffer`'s gradients have been divided by `divisor`.
  void before(std::size_t index, const Bucket& bucket, int divisor);
  void after(std::size_t index, const at::Tensor& reduced);
  // `order`: parameters as they became ready. Waits for devices.
  Found collect(const std::vector<std::size_t>& order);
  std::string tell(std::int64_t step, const Found& found) const { return callback_(step, found); }

 private:
  struct Entry {
    double before = std::numeric_limits<double>::quiet_NaN();
    double after = std::numeric_limits<double>::quiet_NaN();
    int divisor = 1;
    std::vector<std::size_t> parameters;  // whose norms are in device_norms
    at::Tensor device_norms;              // of the single gradients
    at::Tensor device_after;
  };
  struct Bad {
    std::size_t parameter;
    bool nan;
  };

  void locate(const Bucket& bucket, const at::Tensor& values);
  void read_device(Entry& entry);

  const std::int64_t every_;
  const Callback callback_;
  std::vector<Entry> entries_;
  std::vector<Bad> bad_;
  std::int64_t host_ns_ = 0;
};

}  // namespace ddp_lab
