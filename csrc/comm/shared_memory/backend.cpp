#include "comm/shared_memory/backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>
#include <vector>

#include "comm/checks.h"
#include "comm/piecewise.h"
#include "comm/shared_memory/collectives.h"
#include "comm/shared_memory/kernels.h"
#include "comm/shared_memory/queue.h"

namespace ddp_lab::shared_memory {

namespace {

using Tensors = std::vector<at::Tensor>;
using Pointer = c10::intrusive_ptr<c10d::Work>;

// Whether the caller goes on at once; older releases of torch don't tell.
template <typename Options>
bool asynchronous(const Options& options) {
  if constexpr (requires { options.asyncOp; }) {
    return options.asyncOp;
  } else {
    return true;
  }
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

// What `make` makes of each tensor.
template <typename Make>
auto each(const Tensors& tensors, Make make) {
  std::vector<decltype(make(tensors[0]))> made;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(made), make);
  return made;
}

// Whether some of them share memory: what is reduced in place must not be reduced again.
bool overlap(const Tensors& tensors) {
  if (tensors.size() < 2) return false;
  std::vector<std::pair<std::byte*, std::byte*>> ranges;
  for (const at::Tensor& tensor : tensors) ranges.emplace_back(bytes_of(tensor), bytes_of(tensor) + tensor.nbytes());
  std::sort(ranges.begin(), ranges.end());
  return std::adjacent_find(ranges.begin(), ranges.end(),
                            [](const auto& one, const auto& next) { return next.first < one.second; }) != ranges.end();
}

std::vector<std::byte*> all_bytes(const Tensors& tensors) { return each(tensors, bytes_of); }

std::vector<const std::byte*> all_inputs(const Tensors& tensors) {
  return each(tensors, [](const at::Tensor& tensor) -> const std::byte* { return bytes_of(tensor); });
}

Tensors contiguous(const Tensors& tensors) {
  return each(tensors, [](const at::Tensor& tensor) { return tensor.contiguous(); });
}

std::vector<Piece> pieces(const Tensors& tensors) {
  return each(tensors, [](const at::Tensor& tensor) { return Piece{bytes_of(tensor), tensor.nbytes()}; });
}

// Where results go: the tensors themselves, or contiguous ones that are copied into them.
class Outputs {
 public:
  explicit Outputs(Tensors tensors) : tensors_(std::move(tensors)) {
    for (const at::Tensor& tensor : tensors_) {
      used_.push_back(tensor.is_contiguous() ? tensor : at::empty_like(tensor, at::MemoryFormat::Contiguous));
    }
  }
  const Tensors& used() const { return used_; }
  void done() const {
    for (std::size_t i = 0; i < used_.size(); ++i) {
      if (!used_[i].is_same(tensors_[i])) {
        tensors_[i].copy_(used_[i]);
      }
    }
  }

 private:
  Tensors tensors_;
  Tensors used_;
};

bool uneven(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() != tensors[0].numel(); });
}

Call call_of(Kind kind, const at::Tensor& tensor, std::int64_t root = kAll) {
  Call call;
  call.kind = kind;
  call.bytes = tensor.nbytes();
  call.dtype = static_cast<std::uint8_t>(tensor.scalar_type());
  call.root = static_cast<std::int32_t>(root);
  return call;
}

Call reducing(Kind kind, const at::Tensor& tensor, const c10d::ReduceOp& op, std::int64_t root = kAll) {
  check_reducible(tensor.scalar_type(), op);
  Call call = call_of(kind, tensor, root);
  call.reduction = static_cast<std::uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op));
  return call;
}

Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return {tensor.scalar_type(), op, static_cast<std::size_t>(tensor.element_size())};
}

// The rows of a tensor that go to, or come from, each rank; without `sizes` as many for each.
Tensors rows(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int size) {
  check_contiguous(tensor, "shm: all_to_all_single");
  c10d::checkSplitSizes(sizes, tensor, size);
  return sizes.empty() ? tensor.tensor_split(size) : tensor.split_with_sizes(sizes);
}

// The parts of a tensor that belong to each rank, for the forms that take one tensor for all.
Tensors parts(const at::Tensor& whole, int size, const char* what) {
  check_contiguous(whole, what);
  TORCH_CHECK(whole.numel() % size == 0, what, ": ", whole.numel(), " elements can't be divided among ", size,
              " ranks");
  return whole.view({-1}).tensor_split(size);
}

// One list of outputs for each input: of lists of ranks, each with one for each input.
std::vector<Tensors> by_input(const std::vector<Tensors>& by_rank, std::size_t inputs, const char* what) {
  std::vector<Tensors> found(inputs);
  for (const Tensors& list : by_rank) {
    TORCH_CHECK(list.size() == inputs, what, ": ", list.size(), " outputs for ", inputs, " inputs");
    for (std::size_t i = 0; i < inputs; ++i) {
      found[i].push_back(list[i]);
    }
  }
  return found;
}

void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* what) {
  TORCH_CHECK(outputs.size() == inputs.size(), what, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs");
}

// What each operation checks, says to the other ranks, and does in its turn.
class Backend final : public c10d::Backend, public PiecewiseBackend {
 public:
  Backend(std::unique_ptr<Group> group, c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout)
      : c10d::Backend(group->rank(), group->size()),
        group_(std::move(group)),
        gloo_(std::move(gloo)),
        queue_(*group_, timeout) {}

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
    queue_.set_timeout(timeout);
  }
  std::chrono::milliseconds timeout() { return queue_.timeout(); }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return queue_.given() + gloo_->getSequenceNumberForGroup(); }
  void abort() override { group_->break_off(group_->name(rank_) + " aborted the group"); }
  bool broken() const { return group_->broken(); }

  // See [Note: tensors that other ranks read].
  bool supportsTensorAlloc(c10::DeviceIndex) override { return group_->has_pools(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    TORCH_CHECK_VALUE(options.device().is_cpu(), "shm: memory that ranks share is the CPU's, not that of ",
                      options.device());
    const at::Tensor made = group_->has_pools() ? Pool::own()->allocate(size, options) : at::Tensor();
    return made.defined() ? made : at::empty({size}, options);
  }

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const char* const what = "shm: broadcast";
    const at::Tensor tensor = in_place(only(tensors, what), what);
    check_root(options.rootRank, size_, what);
    const Call call = call_of(Kind::kBroadcast, tensor, options.rootRank);
    return give(c10d::OpType::BROADCAST, "shm:broadcast", tensors, tensors, options,
                [this, call, tensor](const WaitPolicy& policy) {
                  group_->enter(call);
                  shared_memory::broadcast(*group_, bytes_of(tensor), tensor.nbytes(), call.root, policy);
                });
  }

  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1 && tensors[0].layout() != at::kStrided) {
      return forwarded(c10d::OpType::ALLREDUCE, "shm:all_reduce", tensors, gloo_->allreduce(tensors, options));
    }
    only(tensors, "shm: all_reduce");
    return reduce_all(c10d::OpType::ALLREDUCE, "shm:all_reduce", "shm: all_reduce", tensors, options);
  }

  Pointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check_some(tensors, "shm: all_reduce_coalesced");
    return reduce_all(c10d::OpType::ALLREDUCE_COALESCED, "shm:all_reduce_coalesced", "shm: all_reduce_coalesced",
                      tensors, options);
  }

  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    only(tensors, "shm: reduce");
    check_root(options.rootRank, size_, "shm: reduce");
    return reduce_all(c10d::OpType::REDUCE, "shm:reduce", "shm: reduce", tensors, options,
                      static_cast<int>(options.rootRank));
  }

  Pointer sum_pieces(const at::Tensor& like, std::vector<SumPiece> pieces, double factor, Tensors kept) override {
    const Pieces array(std::move(pieces), like.scalar_type(), factor);
    TORCH_INTERNAL_ASSERT(array.bytes() == like.nbytes(), "the pieces are not the whole array");
    const Call call = reducing(Kind::kAllReduce, like, c10d::ReduceOp::SUM);
    const Reduction reduction = reduction_of(like, c10d::ReduceOp::SUM);
    return give(c10d::OpType::ALLREDUCE, "shm:all_reduce", {like}, {like}, c10d::AllreduceOptions(),
                [this, call, array, reduction, kept = std::move(kept)](const WaitPolicy& policy) {
                  group_->enter(call);
                  all_reduce(*group_, array, reduction, kAll, policy);
                });
  }

  Pointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return forwarded(c10d::OpType::_ALLREDUCE_SPARSE, "shm:all_reduce_sparse", tensors,
                     gloo_->allreduce_sparse(tensors, options));
  }

  Pointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const char* const what = "shm: all_gather";
    only(inputs, what);
    if (uneven(only_list(outputs, size_, "output", what))) {
      return forwarded(c10d::OpType::ALLGATHER, "shm:all_gather", inputs, gloo_->allgather(outputs, inputs, options));
    }
    check_same(outputs[0], inputs[0], what);
    return gather_all(c10d::OpType::ALLGATHER, "shm:all_gather", inputs, outputs, outputs[0], options);
  }

  Pointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    const char* const what = "shm: all_gather_coalesced";
    check_some(inputs, what);
    check_count(outputs.size(), size_, what);
    const std::vector<Tensors> of_inputs = by_input(outputs, inputs.size(), what);
    Tensors result;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_tensor(inputs[i], what);
      check_same(of_inputs[i], inputs[i], what);
      result.insert(result.end(), of_inputs[i].begin(), of_inputs[i].end());
    }
    return gather_all(c10d::OpType::ALLGATHER_COALESCED, "shm:all_gather", inputs, of_inputs, result, options);
  }

  Pointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  Pointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    const char* const what = "shm: all_gather_into_tensor";
    check_pairs(outputs, inputs, what);
    std::vector<Tensors> to;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_tensor(inputs[i], what);
      to.push_back(parts(outputs[i], size_, what));
      check_same(to.back(), inputs[i], what);
    }
    return gather_all(c10d::OpType::_ALLGATHER_BASE, "shm:all_gather_into_tensor", inputs, to, outputs, options);
  }

  Pointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const at::Tensor& input = only(inputs, "shm: gather");
    const Tensors to = list_of_root(outputs, input, options.rootRank, rank_, size_, "output", "shm: gather");
    return gather_all(c10d::OpType::GATHER, "shm:gather", inputs, {to}, to, options,
                      static_cast<int>(options.rootRank));
  }

  Pointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const at::Tensor& first = only(outputs, "shm: scatter");
    const Tensors from =
        contiguous(list_of_root(inputs, first, options.rootRank, rank_, size_, "input", "shm: scatter"));
    const Call call = call_of(Kind::kScatter, first, options.rootRank);
    return give(c10d::OpType::SCATTER, "shm:scatter", from, outputs, options,
                [this, call, from, to = Outputs(outputs)](const WaitPolicy& policy) {
                  group_->enter(call);
                  const at::Tensor& output = to.used()[0];
                  shared_memory::scatter(*group_, all_inputs(from), bytes_of(output), output.nbytes(), call.root,
                                         policy);
                  to.done();
                });
  }

  Pointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const char* const what = "shm: reduce_scatter";
    only(outputs, what);
    if (uneven(only_list(inputs, size_, "input", what))) {
      return forwarded(c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", inputs[0],
                       gloo_->reduce_scatter(outputs, inputs, options));
    }
    check_same(inputs[0], outputs[0], what);
    return reduce_parts(c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", inputs[0], {contiguous(inputs[0])}, outputs,
                        options);
  }

  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  Pointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    const char* const what = "shm: reduce_scatter_tensor";
    check_pairs(outputs, inputs, what);
    std::vector<Tensors> from;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_contiguous(outputs[i], what);
      from.push_back(parts(inputs[i].contiguous(), size_, what));
      check_same(from.back(), outputs[i], what);
    }
    return reduce_parts(c10d::OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter_tensor", inputs, from, outputs,
                        options);
  }

  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return exchange("shm:all_to_all_single", {input}, rows(input, input_sizes, size_),
                    rows(output, output_sizes, size_), {output}, options);
  }

  Pointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return exchange("shm:all_to_all", inputs, inputs, outputs, outputs, options);
  }

  Pointer send(Tensors& tensors, int rank, int tag) override {
    return forwarded(c10d::OpType::SEND, "shm:send", tensors, gloo_->send(tensors, rank, tag));
  }

  Pointer recv(Tensors& tensors, int rank, int tag) override {
    return forwarded(c10d::OpType::RECV, "shm:recv", tensors, gloo_->recv(tensors, rank, tag));
  }

  Pointer recvAnysource(Tensors& tensors, int tag) override {
    return forwarded(c10d::OpType::RECVANYSOURCE, "shm:recvAnySource", tensors, gloo_->recvAnysource(tensors, tag));
  }

  Pointer barrier(const c10d::BarrierOptions& options) override {
    return give(c10d::OpType::BARRIER, "shm:barrier", {}, {}, options, [this](const WaitPolicy& policy) {
      group_->enter(Call{});
      group_->barrier(policy);
    });
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override {
    gloo_->monitoredBarrier(options, wait_for_all);
  }

 private:
  // Runs `run` in its turn. A profile shows the tensors `inputs`.
  template <typename Options, typename Run>
  Pointer give(c10d::OpType kind, const char* title, const Tensors& inputs, const Tensors& outputs,
               const Options& options, Run run) {
    return queue_.give({kind, title, inputs, outputs, options.timeout, asynchronous(options), std::move(run)},
                       getGroupUid());
  }

  Pointer forwarded(c10d::OpType kind, const char* title, const Tensors& inputs, Pointer work) const {
    return c10::make_intrusive<Forwarded>(rank_, kind, title, inputs, std::move(work));
  }

  // Each tensor becomes the reduction over all ranks: on rank `root`, or on all of them.
  template <typename Options>
  Pointer reduce_all(c10d::OpType kind, const char* title, const char* what, const Tensors& tensors,
                     const Options& options, int root = kAll) {
    const Kind said = root == kAll ? Kind::kAllReduce : Kind::kReduce;
    std::vector<Call> calls;
    for (const at::Tensor& tensor : tensors) {
      calls.push_back(reducing(said, in_place(tensor, what), options.reduceOp, root));
    }
    return give(kind, title, tensors, tensors, options,
                [this, calls, tensors, root, op = options.reduceOp](const WaitPolicy& policy) {
                  const at::NoGradGuard no_grad;
                  Tensors copies;
                  if (overlap(tensors)) copies = each(tensors, [](const at::Tensor& tensor) { return tensor.clone(); });
                  const Tensors& reduced = copies.empty() ? tensors : copies;
                  for (std::size_t i = 0; i < reduced.size(); ++i) {
                    std::byte* const data = bytes_of(reduced[i]);
                    group_->enter(calls[i], root == kAll ? data : nullptr);
                    all_reduce(*group_, {data, reduced[i].nbytes()}, reduction_of(reduced[i], op), root, policy);
                  }
                  for (std::size_t i = 0; i < copies.size(); ++i) tensors[i].copy_(copies[i]);
                });
  }

  // outputs[i][r] becomes what rank r has in inputs[i]: on rank `root`, or on all of them; elsewhere outputs[i] is
  // empty.
  template <typename Options>
  Pointer gather_all(c10d::OpType kind, const char* title, const Tensors& inputs, const std::vector<Tensors>& outputs,
                     const Tensors& result, const Options& options, int root = kAll) {
    std::vector<Call> calls;
    for (const at::Tensor& input : inputs) {
      calls.push_back(call_of(root == kAll ? Kind::kAllGather : Kind::kGather, input, root));
    }
    const std::vector<Outputs> to(outputs.begin(), outputs.end());
    return give(kind, title, inputs, result, options,
                [this, calls, to, root, from = contiguous(inputs)](const WaitPolicy& policy) {
                  for (std::size_t i = 0; i < from.size(); ++i) {
                    group_->enter(calls[i]);
                    all_gather(*group_, bytes_of(from[i]), all_bytes(to[i].used()), from[i].nbytes(), root, policy);
                    to[i].done();
                  }
                });
  }

  // outputs[i] becomes the reduction of what all ranks have in inputs[i][rank], which are contiguous.
  Pointer reduce_parts(c10d::OpType kind, const char* title, const Tensors& shown, const std::vector<Tensors>& inputs,
                       const Tensors& outputs, const c10d::ReduceScatterOptions& options) {
    std::vector<Call> calls;
    for (const at::Tensor& output : outputs) {
      calls.push_back(reducing(Kind::kReduceScatter, output, options.reduceOp));
    }
    return give(kind, title, shown, outputs, options,
                [this, calls, inputs, to = Outputs(outputs), op = options.reduceOp](const WaitPolicy& policy) {
                  for (std::size_t i = 0; i < inputs.size(); ++i) {
                    const at::Tensor& output = to.used()[i];
                    group_->enter(calls[i]);
                    shared_memory::reduce_scatter(*group_, all_inputs(inputs[i]), bytes_of(output),
                                                  static_cast<std::size_t>(output.numel()), reduction_of(output, op),
                                                  policy);
                  }
                  to.done();
                });
  }

  Pointer exchange(const char* title, const Tensors& shown, const Tensors& inputs, const Tensors& outputs,
                   const Tensors& result, const c10d::AllToAllOptions& options) {
    const char* const what = "shm: all_to_all";
    for (const Tensors* tensors : {&inputs, &outputs}) {
      check_count(tensors->size(), size_, what);
      for (const at::Tensor& tensor : *tensors) {
        check_tensor(tensor, what);
        check_dtype(tensor, inputs[0], what);
      }
    }
    Call call = call_of(Kind::kAllToAll, inputs[0]);
    call.bytes = 0;  // sizes may differ; they are compared later
    return give(c10d::OpType::ALLTOALL, title, shown, result, options,
                [this, call, from = contiguous(inputs), to = Outputs(outputs)](const WaitPolicy& policy) {
                  group_->enter(call);
                  all_to_all(*group_, pieces(from), pieces(to.used()), policy);
                  to.done();
                });
  }

  const std::unique_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  Queue queue_;  // goes first: its thread uses the group
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(std::unique_ptr<Group> group, c10::intrusive_ptr<c10d::Backend> gloo,
                                               std::chrono::milliseconds timeout) {
  return c10::make_intrusive<Backend>(std::move(group), std::move(gloo), timeout);
}

std::optional<std::chrono::milliseconds> timeout_of(c10d::Backend& backend) {
  auto* const ours = dynamic_cast<Backend*>(&backend);
  return ours == nullptr ? std::nullopt : std::optional(ours->timeout());
}

bool is_broken(const c10d::Backend& backend) {
  const auto* const ours = dynamic_cast<const Backend*>(&backend);
  return ours != nullptr && ours->broken();
}

}  // namespace ddp_lab::shared_memory
