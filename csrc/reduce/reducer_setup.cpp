// Reducer: its hooks, its buckets, its process group.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>

#include "record/recorder.h"
#include "reduce/output_hook.h"
#include "reduce/reducer.h"

namespace ddp_lab {

Reducer::Reducer(std::vector<at::Tensor> parameters, const Assignment& assignment, GroupPointer group,
                 EventOrigin origin, ReducerOptions options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      reduction_(std::move(group)),
      origin_(origin),
      schedule_(assignment),
      use_(parameters_.size(), parameters_.at(0).device()) {
  TORCH_CHECK(parameters_.size() == options_.names.size(), "every parameter needs a name");
  places_.resize(parameters_.size());
  firings_.reserve(parameters_.size());
  assign(assignment);
  for (const auto& bucket : buckets_) {
    const c10::Device device = bucket->device();
    const auto same = [&](const auto& known) { return known.first == device; };
    if (std::any_of(spans_.begin(), spans_.end(), same)) continue;
    if (auto made = DeviceSpans::make(device)) spans_.emplace_back(device, std::move(made));
  }
  add_hooks();
  if (options_.find_unused_parameters) {
    std::vector<const torch::autograd::Node*> accumulators;
    for (const auto& [node, key] : hooks_) accumulators.push_back(node.get());
    use_.search(accumulators);
  }
  if (options_.static_graph) use_.set_static_graph();
}

Reducer::~Reducer() { remove_hooks(); }

void Reducer::add_hooks() {
  using torch::autograd::variable_list;
  using torch::autograd::utils::LambdaPostHook;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // The variable holds its accumulator weakly, so it is kept here, or the hook would be lost with it.
    NodePointer node = torch::autograd::impl::grad_accumulator(parameters_[i]);
    const std::uintptr_t key = node->add_post_hook(std::make_unique<LambdaPostHook>(
        [this, i](const variable_list& outputs, const variable_list& inputs) {
          on_grad_ready(i, inputs.empty() ? at::Tensor() : inputs[0]);
          return outputs;
        },
        [](torch::autograd::CompiledNodeArgs&) { refuse_compiled_autograd(); }));
    hooks_.emplace_back(std::move(node), key);
  }
}

void Reducer::remove_hooks() {
  const Lock lock(mutex_);
  for (const auto& [node, key] : hooks_) node->del_post_hook(key);
  use_.stop_search();  // it knows the nodes by their addresses
  hooks_.clear();
}

std::unique_ptr<Bucket> Reducer::make_bucket(const std::vector<std::size_t>& indices) const {
  BucketOptions options;
  if (!indices.empty() && parameters_.at(indices.front()).is_floating_point()) options.dtype = options_.dtype;
  options.batched = options_.batched_grad_copy;
  options.lazy = options_.lazy_bucket_allocation;
  options.notices = notices_;
  const bool on_cpu = !indices.empty() && parameters_.at(indices.front()).is_cpu();
  if (on_cpu && !options.lazy) options.make_buffer = reduction_.cpu_memory();
  std::vector<at::Tensor> variables;
  for (const std::size_t index : indices) {
    TORCH_CHECK(index < parameters_.size(), "there is no parameter ", index);
    options.sparse = options.sparse || (index < options_.expect_sparse.size() && options_.expect_sparse[index]);
    variables.push_back(parameters_[index]);
    options.names.push_back(options_.names[index]);
  }
  auto bucket = std::make_unique<Bucket>(indices, variables, std::move(options));
  tell_known_rows(*bucket);
  return bucket;
}

// The new buckets take the memory of the old ones: these are let go first, and where gradients are their views, each
// buffer goes with the last of them.
void Reducer::assign(const Assignment& assignment) {
  BucketSchedule schedule(assignment);  // refuses empty buckets and parameters in two buckets
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
  const at::NoGradGuard no_grad;
  std::vector<bool> was_view(parameters_.size(), false);
  for (std::size_t i = 0; !buckets_.empty() && i < parameters_.size(); ++i) {
    was_view[i] = buckets_[places_[i].bucket]->is_view(places_[i].slot, parameters_[i].grad());
  }
  buckets_.clear();
  launched_.clear();
  for (const auto& indices : assignment) {
    buckets_.push_back(make_bucket(indices));
    for (const Slot& slot : buckets_.back()->slots()) {
      if (!was_view[slot.parameter]) continue;
      at::Tensor& gradient = parameters_[slot.parameter].mutable_grad();
      slot.view.copy_(gradient);
      gradient = slot.view;
    }
  }
  places_ = std::move(places);
  schedule_ = std::move(schedule);
  launched_.assign(buckets_.size(), Launched{});
  last_.assign(buckets_.size());
}

void Reducer::set_gradient_dtype(at::ScalarType dtype) {
  const Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "the gradients' type can't be set during a backward");
  options_.dtype = dtype;
  Assignment assignment;
  for (const auto& bucket : buckets_) {
    assignment.emplace_back();
    for (const Slot& slot : bucket->slots()) assignment.back().push_back(slot.parameter);
  }
  assign(assignment);
}

void Reducer::set_optimizer_in_backward(const std::vector<std::size_t>& parameters) {
  const Lock lock(mutex_);
  optimized_.assign(parameters_.size(), parameters.empty());
  for (const std::size_t parameter : parameters) optimized_.at(parameter) = true;
}

void Reducer::set_sparse_metadata(const std::map<std::string, at::Tensor>& metadata) {
  const Lock lock(mutex_);
  sparse_metadata_ = metadata;
  for (const auto& bucket : buckets_) tell_known_rows(*bucket);
}

void Reducer::tell_known_rows(Bucket& bucket) const {
  if (!bucket.sparse()) return;
  if (sparse_metadata_.empty()) return bucket.set_known_rows(at::Tensor());
  const std::string& name = bucket.slots().front().name;
  auto found = sparse_metadata_.find(name);
  if (found == sparse_metadata_.end()) found = sparse_metadata_.find("." + name);  // torch's name in the root
  TORCH_CHECK(found != sparse_metadata_.end(), "param: ", name,
              " not found in sparse metadata: _set_sparse_metadata needs the rows of every sparse parameter");
  bucket.set_known_rows(found->second);
}

bool Reducer::rebuild_due() const {
  const Lock lock(mutex_);
  // Parameters that come and go have no order of readiness.
  const bool ordered = !options_.find_unused_parameters || use_.static_graph();
  return ordered && !rebuilt_ && !in_flight_ && last_.ready() == parameters_.size();
}

void Reducer::rebuild(const Assignment& assignment) {
  const Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "buckets can't be assigned anew during a backward");
  assign(assignment);
  rebuilt_ = true;
  ++origin_.generation;
  recorder().record(event(Kind::kRebuilt));
}

void Reducer::update_process_group(GroupPointer group, std::int32_t index, const Assignment& assignment) {
  const Lock lock(mutex_);
  TORCH_CHECK(!finalizing_, "the process group can't be replaced while a backward waits for it");
  abandon_backward();
  // The old group is let go outside the lock: its threads may take a while to end.
  reduction_.swap_group(group);
  origin_.process_group = index;
  rebuilt_ = false;
  last_.set_order({});
  assign(assignment);
  ++origin_.generation;
}

void Reducer::set_comm_hook(HookPointer hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!reduction_.hook(), "register_comm_hook or register_builtin_comm_hook can only be called once.");
  TORCH_CHECK(!in_flight_, "a comm hook can't be registered during a backward");
  reduction_.swap_hook(hook);
}

void Reducer::clear_comm_hook() {
  HookPointer old;  // let go outside the lock: that may need the GIL
  const Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "a comm hook can't be taken away during a backward");
  reduction_.swap_hook(old);
}

void Reducer::set_builtin_hook(c10d::BuiltinCommHookType kind) {
  const Lock lock(mutex_);
  set_comm_hook(make_builtin_hook(kind, reduction_.group()));
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  TORCH_CHECK(iteration_ == 0,
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed; ",
              iteration_, " forwards have begun");
  use_.set_static_graph();
}

}  // namespace ddp_lab
