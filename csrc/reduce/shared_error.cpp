#include "reduce/shared_error.h"

#include <ATen/Functions.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "reduce/comm_hook.h"

namespace ddp_lab {
namespace {

constexpr std::chrono::seconds kPatience(10);

// Null for a group that was made without a store.
template <typename Group>
c10::intrusive_ptr<c10d::Store> store_of(const Group& group) {
  if constexpr (requires { group.getStore(); }) {
    return group.getStore();
  } else {
    return nullptr;
  }
}

}  // namespace

SharedError::SharedError(c10d::ProcessGroup& group, std::int32_t reducer, std::int64_t step)
    : group_(group), key_("ddp_lab/error/" + std::to_string(reducer) + "/" + std::to_string(step)) {}

void SharedError::raise_everywhere(const std::string& message, const std::vector<at::Tensor>& unlaunched) const {
  const auto store = store_of(group_);
  if (!store) return;
  try {
    store->set(key_, std::vector<std::uint8_t>(message.begin(), message.end()));
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (const at::Tensor& buffer : unlaunched) {
      const at::Tensor like = as_reals(buffer);  // as its all_reduce sees it
      std::vector<at::Tensor> tensors{at::full(like.sizes(), std::numeric_limits<double>::quiet_NaN(), like.options())};
      works.push_back(group_.allreduce(tensors));
    }
    for (const auto& work : works) work->wait(kPatience);
  } catch (const std::exception& error) {
    // The message matters more here: it is about to be raised.
    TORCH_WARN("this rank's error could not be sent to the other ranks: ", error.what());
  }
}

std::string SharedError::found() const {
  const auto store = store_of(group_);
  try {
    if (!store || !store->check({key_})) return "";
    const std::vector<std::uint8_t> text = store->get(key_);
    return {text.begin(), text.end()};
  } catch (const std::exception&) {
    return "";  // the store went with its rank: the caller has an error of its own
  }
}

bool SharedError::marks(const at::Tensor& reduced) {
  if (!reduced.device().is_cpu() || reduced.layout() != at::kStrided || reduced.numel() == 0) return false;
  if (reduced.scalar_type() == at::kFloat) return std::isnan(*reduced.const_data_ptr<float>());
  if (reduced.scalar_type() == at::kDouble) return std::isnan(*reduced.const_data_ptr<double>());
  if (!reduced.is_floating_point() && !reduced.is_complex()) return false;
  return std::isnan(as_reals(reduced).flatten()[0].item<double>());
}

}  // namespace ddp_lab
