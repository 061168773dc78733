// Reducer: its hooks, its buckets, its process group.
#include "record/recorder.h"
#include "reduce/reducer.h"

namespace ddp_lab {

Reducer::Reducer(std::vector<at::Tensor> parameters, const Assignment& assignment, GroupPointer group,
                 EventOrigin origin, ReducerOptions options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      reduction_(std::move(group)),
      origin_(origin),
      use_(parameters_.size(), parameters_.at(0).device()),
      buckets_(assignment, parameters_, options_, reduction_),
      schedule_(assignment),
      launched_(buckets_.size()) {
  marks_.resize(parameters_.size());
  firings_.reserve(parameters_.size());
  last_.assign(buckets_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.add(parameters_[i], [this, i](const torch::autograd::variable_list& arrived) {
      on_grad_ready(i, arrived.empty() ? at::Tensor() : arrived[0]);
    });
  }
  if (options_.find_unused_parameters) use_.search(hooks_.accumulators());
  if (options_.static_graph) use_.set_static_graph();
}

Reducer::~Reducer() { remove_hooks(); }

void Reducer::remove_hooks() {
  const Lock lock(mutex_);
  use_.stop_search();  // it knows the nodes by their addresses
  hooks_.remove();
}

void Reducer::assign(const Assignment& assignment) {
  for (Launched& launched : launched_) launched = Launched{};  // they hold the old buffers
  schedule_ = buckets_.assign(assignment);
  launched_.resize(buckets_.size());
  last_.assign(buckets_.size());
}

void Reducer::set_gradient_dtype(at::ScalarType dtype) {
  const Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "the gradients' type can't be set during a backward");
  options_.dtype = dtype;
  assign(buckets_.assignment());
}

void Reducer::set_optimizer_in_backward(const std::vector<std::size_t>& parameters) {
  const Lock lock(mutex_);
  optimized_.assign(parameters_.size(), parameters.empty());
  for (const std::size_t parameter : parameters) optimized_.at(parameter) = true;
}

void Reducer::set_sparse_metadata(const std::map<std::string, at::Tensor>& metadata) {
  const Lock lock(mutex_);
  buckets_.set_sparse_metadata(metadata);
}

bool Reducer::rebuild_due() const {
  const Lock lock(mutex_);
  // Parameters that come and go have no order of readiness.
  const bool ordered = !options_.find_unused_parameters || use_.static_graph();
  return ordered && !buckets_.rebuilt && !in_flight_ && last_.ready() == parameters_.size();
}

void Reducer::rebuild(const Assignment& assignment) {
  const Lock lock(mutex_);
  TORCH_CHECK(!in_flight_, "buckets can't be assigned anew during a backward");
  assign(assignment);
  buckets_.rebuilt = true;
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
  buckets_.rebuilt = false;
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
