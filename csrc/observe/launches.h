// Sees the collectives of buckets that torch's reducer launches, and when they are complete, without taking part.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <optional>

#include "record/event.h"
#include "reduce/device_spans.h"

namespace c10d {
class Reducer;
}

namespace ddp_lab {

// A bucket whose collective is being started.
struct SeenLaunch {
  Event event;
  std::shared_ptr<DeviceSpans::Span> span;                                       // null on a CPU
  std::shared_ptr<std::once_flag> reduced = std::make_shared<std::once_flag>();  // called when it was recorded
};

// Records that the bucket is reduced, once; it is recorded when this returns, also where another thread does it at the
// same time. Who waits for a future can go on before its callbacks have run, so the end of the backward says it for
// those that have not.
void note_reduced(const SeenLaunch& launch);

class LaunchListener {
 public:
  virtual ~LaunchListener() = default;
  // An all-reduce of `buffer` is about to start: of a bucket? Any thread.
  virtual std::optional<SeenLaunch> launching(const at::Tensor& buffer) = 0;
  // The comm hook is about to be called for bucket `index`.
  virtual std::optional<SeenLaunch> launching(std::size_t index) = 0;
};

// [Note: seeing a launch without a comm hook]
// Torch tells nobody when a bucket is launched. A comm hook would be told, but it changes what happens: without one
// torch divides while it copies gradients in, and a hook has to do that itself. So with none:
//  - The all-reduce that torch starts passes the dispatcher, as the operator c10d::allreduce_. The kernel there (see
//    comm/collective_interception.h) asks us: we compare the tensor's address with that of the next bucket's buffer,
//    and have the work's future, which torch asks for anyway, note when it is complete. The call is handed on
//    unchanged.
//  - A comm hook that the user registers, before or after, is wrapped in place: it is called with the same bucket, and
//    what it returns is returned. The pointer to it is private; [temp.spec] lets an explicit instantiation name it.
void listen(const std::shared_ptr<LaunchListener>& listener);

// Wraps the reducer's comm hook, if it has one that is not wrapped. Not during a backward.
void watch_hook(c10d::Reducer& reducer, const std::weak_ptr<LaunchListener>& listener);
// Puts the user's hook back in its place.
void unwatch_hook(c10d::Reducer& reducer);

}  // namespace ddp_lab
