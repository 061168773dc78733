// What the averaged gradients of a bucket are, in two numbers: equal on all ranks, or something is wrong.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace ddp_lab {

struct Inspection {
  double norm = 0;             // Euclidean, over all gradients of the bucket
  std::uint64_t checksum = 0;  // of the gradients' bits in logical order: differs if one bit does (almost surely)
};
using Inspections = std::vector<Inspection>;  // by bucket

// [Note: inspecting gradients]
// The thread that trains may look at `.grad`. No other thread may, not even with the GIL: `p.grad = None` first gives
// the gradient up and then forgets its address, and freeing it can let other threads run in between. Such a thread
// gets to see the buckets' buffers. The reducer owns them, and its mutex keeps the next backward from writing to them;
// they hold what the last one averaged (zeros for what no rank used), whatever has become of the gradients since. If
// gradients are their views then only until something is written to one, as zero_grad and clipping do: the version that
// autograd counts tells, and no forward may have begun. There is nothing to inspect either if the buffers were let go,
// were never allocated (sparse gradients), or if a comm hook returned another tensor. Then, and whenever a step is yet
// to come, the request waits for the end of the next backward, which inspects on a thread of that backward: the same
// buffers where possible, so that ranks that answer early and late give the same numbers.

// Undefined gradients count as absent. Gradients on a device are copied to the CPU, which waits for the
// device.
Inspection inspect(const std::vector<at::Tensor>& gradients);

// By bucket; nothing if one was written to meanwhile.
std::optional<Inspections> inspect_unchanged(const std::vector<std::vector<at::Tensor>>& buckets);

// The same checksum of one dense tensor of any dtype.
std::uint64_t checksum_of(const at::Tensor& tensor);

// What is to be inspected at the end of a backward. Guarded by its owner's mutex, but for the request (any thread).
class Inspector {
 public:
  using Callback = std::function<void(std::int64_t step, const Inspections&)>;

  void set_callback(Callback callback) { callback_ = std::move(callback); }
  // The callback is to be called at the end of the first backward from step `from` on.
  void request(std::int64_t from) noexcept { from_ = from; }
  bool pending() const noexcept { return from_ != kNone; }
  // At the end of the backward of `step`: what is to be called there, or null. That was the request's answer.
  Callback take(std::int64_t step) {
    if (step < from_ || !callback_) return nullptr;
    from_ = kNone;
    return callback_;
  }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  Callback callback_;
  std::atomic<std::int64_t> from_{kNone};
};

}  // namespace ddp_lab
