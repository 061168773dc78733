// Backend's operations: what each checks, says to the other ranks, and does in its turn.
#include <algorithm>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

#include "comm/shared_memory/backend.h"
#include "comm/shared_memory/collectives.h"
#include "comm/shared_memory/kernels.h"

namespace ddp_lab::shared_memory {

namespace {

using Tensors = Backend::Tensors;

// Whether the caller goes on at once; older releases of torch don't tell.
template <typename Options>
bool asynchronous(const Options& options) {
  if constexpr (requires { options.asyncOp; }) {
    return options.asyncOp;
  } else {
    return true;
  }
}

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "shm: ", what, " needs tensors on the CPU, this one is on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "shm: ", what, " needs dense tensors");
}

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "shm: ", what, " takes one tensor, not ", tensors.size());
  check_tensor(tensors[0], what);
  return tensors[0];
}

// In place: elements may lie in any order, as long as they fill a piece of memory.
const at::Tensor& in_place(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "shm: Tensors must be contiguous: ", what,
                    " works in place, and this one of shape ", tensor.sizes(), " has strides ", tensor.strides());
  return tensor;
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

std::vector<std::byte*> all_bytes(const Tensors& tensors) {
  std::vector<std::byte*> found;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(found), bytes_of);
  return found;
}

std::vector<const std::byte*> all_inputs(const Tensors& tensors) {
  const std::vector<std::byte*> found = all_bytes(tensors);
  return {found.begin(), found.end()};
}

Tensors contiguous(const Tensors& tensors) {
  Tensors made;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(made),
                 [](const at::Tensor& tensor) { return tensor.contiguous(); });
  return made;
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

void check_same(const Tensors& tensors, const at::Tensor& like, const char* what) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, what);
    TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel(), "shm: ", what,
                      " needs tensors of one dtype and size: one has ", tensor.numel(), " elements of ",
                      tensor.scalar_type(), ", another ", like.numel(), " of ", like.scalar_type());
  }
}

void check_count(std::size_t found, int size, const char* what) {
  TORCH_CHECK_VALUE(found == static_cast<std::size_t>(size), "shm: ", what, " needs a tensor for each of ", size,
                    " ranks, not ", found);
}

void check_root(std::int64_t root, int size, const char* what) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "shm: ", what, ": there is no rank ", root, " in a group of ", size);
}

bool uneven(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() != tensors[0].numel(); });
}

Call call_of(Kind kind, const at::Tensor& tensor, std::int64_t root = -1) {
  Call call;
  call.kind = kind;
  call.bytes = tensor.nbytes();
  call.dtype = static_cast<std::uint8_t>(tensor.scalar_type());
  call.root = static_cast<std::int32_t>(root);
  return call;
}

Call reducing(Kind kind, const at::Tensor& tensor, const c10d::ReduceOp& op, std::int64_t root = -1) {
  check_reducible(tensor.scalar_type(), op);
  Call call = call_of(kind, tensor, root);
  call.reduction = static_cast<std::uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op));
  return call;
}

Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return {tensor.scalar_type(), op, static_cast<std::size_t>(tensor.element_size())};
}

Pieces pieces_of(const at::Tensor& tensor) { return {bytes_of(tensor), tensor.nbytes()}; }

std::vector<Piece> pieces(const Tensors& tensors) {
  std::vector<Piece> made;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(made),
                 [](const at::Tensor& tensor) { return Piece{bytes_of(tensor), tensor.nbytes()}; });
  return made;
}

// The rows of a tensor that go to, or come from, each rank; without `sizes` as many for each.
Tensors rows(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int size) {
  check_tensor(tensor, "all_to_all_single");
  c10d::checkSplitSizes(sizes, tensor, size);
  Tensors made;
  std::int64_t first = 0;
  for (int rank = 0; rank < size; ++rank) {
    const std::int64_t count = sizes.empty() ? tensor.size(0) / size : sizes[static_cast<std::size_t>(rank)];
    made.push_back(tensor.narrow(0, first, count));
    first += count;
  }
  return made;
}

// The parts of a tensor that belong to each rank, for the forms that take one tensor for all.
Tensors parts(const at::Tensor& whole, int size, const char* what) {
  check_tensor(whole, what);
  TORCH_CHECK_VALUE(whole.is_contiguous(), "shm: ", what, ": the tensor must be contiguous");
  TORCH_CHECK_VALUE(whole.numel() % size == 0, "shm: ", what, ": ", whole.numel(), " elements can't be divided among ",
                    size, " ranks");
  const at::Tensor flat = whole.view({-1});
  const std::int64_t each = whole.numel() / size;
  Tensors made;
  for (int rank = 0; rank < size; ++rank) {
    made.push_back(flat.narrow(0, rank * each, each));
  }
  return made;
}

}  // namespace

Backend::Pointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = in_place(only(tensors, "broadcast"), "broadcast");
  check_root(options.rootRank, size_, "broadcast");
  const Call call = call_of(Kind::kBroadcast, tensor, options.rootRank);
  return give(c10d::OpType::BROADCAST, "shm:broadcast", tensors, tensors, options.timeout, asynchronous(options),
              [this, call, tensor](const Patience& patience) {
                group_->enter(call);
                shared_memory::broadcast(*group_, bytes_of(tensor), tensor.nbytes(), call.root, patience);
              });
}

Backend::Pointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].layout() != at::kStrided) {
    return forwarded(c10d::OpType::ALLREDUCE, "shm:all_reduce", tensors, gloo_->allreduce(tensors, options));
  }
  const at::Tensor tensor = in_place(only(tensors, "all_reduce"), "all_reduce");
  const Call call = reducing(Kind::kAllReduce, tensor, options.reduceOp);
  const Reduction reduction = reduction_of(tensor, options.reduceOp);
  return give(c10d::OpType::ALLREDUCE, "shm:all_reduce", tensors, tensors, options.timeout, asynchronous(options),
              [this, call, tensor, reduction](const Patience& patience) {
                group_->enter(call, bytes_of(tensor));
                all_reduce(*group_, pieces_of(tensor), reduction, kAll, patience);
              });
}

Backend::Pointer Backend::sum_pieces(const at::Tensor& like, std::vector<SumPiece> pieces, double factor,
                                     Tensors kept) {
  const Pieces array(std::move(pieces), like.scalar_type(), factor);
  TORCH_INTERNAL_ASSERT(array.bytes() == like.nbytes(), "the pieces are not the whole array");
  const Call call = reducing(Kind::kAllReduce, like, c10d::ReduceOp::SUM);
  const Reduction reduction = reduction_of(like, c10d::ReduceOp::SUM);
  return give(c10d::OpType::ALLREDUCE, "shm:all_reduce", {like}, {like}, c10d::kUnsetTimeout, true,
              [this, call, array, reduction, kept = std::move(kept)](const Patience& patience) {
                group_->enter(call);
                all_reduce(*group_, array, reduction, kAll, patience);
              });
}

Backend::Pointer Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return forwarded(c10d::OpType::_ALLREDUCE_SPARSE, "shm:all_reduce_sparse", tensors,
                   gloo_->allreduce_sparse(tensors, options));
}

Backend::Pointer Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) {
    calls.push_back(reducing(Kind::kAllReduce, in_place(tensor, "all_reduce_coalesced"), options.reduceOp));
  }
  return give(c10d::OpType::ALLREDUCE_COALESCED, "shm:all_reduce_coalesced", tensors, tensors, options.timeout,
              asynchronous(options), [this, calls, tensors, op = options.reduceOp](const Patience& patience) {
                for (std::size_t i = 0; i < tensors.size(); ++i) {
                  group_->enter(calls[i], bytes_of(tensors[i]));
                  all_reduce(*group_, pieces_of(tensors[i]), reduction_of(tensors[i], op), kAll, patience);
                }
              });
}

Backend::Pointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = in_place(only(tensors, "reduce"), "reduce");
  check_root(options.rootRank, size_, "reduce");
  const Call call = reducing(Kind::kReduce, tensor, options.reduceOp, options.rootRank);
  const Reduction reduction = reduction_of(tensor, options.reduceOp);
  return give(c10d::OpType::REDUCE, "shm:reduce", tensors, tensors, options.timeout, asynchronous(options),
              [this, call, tensor, reduction](const Patience& patience) {
                group_->enter(call);
                all_reduce(*group_, pieces_of(tensor), reduction, call.root, patience);
              });
}

Backend::Pointer Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  only(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "shm: all_gather takes one list of outputs, not ", outputs.size());
  check_count(outputs[0].size(), size_, "all_gather");
  if (uneven(outputs[0])) {
    return forwarded(c10d::OpType::ALLGATHER, "shm:all_gather", inputs, gloo_->allgather(outputs, inputs, options));
  }
  check_same(outputs[0], inputs[0], "all_gather");
  const Call call = call_of(Kind::kAllGather, inputs[0]);
  return give(c10d::OpType::ALLGATHER, "shm:all_gather", inputs, outputs[0], options.timeout, asynchronous(options),
              [this, call, input = inputs[0].contiguous(), to = Outputs(outputs[0])](const Patience& patience) {
                group_->enter(call);
                all_gather(*group_, bytes_of(input), all_bytes(to.used()), input.nbytes(), kAll, patience);
                to.done();
              });
}

Backend::Pointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

Backend::Pointer Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty(), "shm: all_gather_coalesced needs at least one tensor");
  check_count(outputs.size(), size_, "all_gather_coalesced");
  std::vector<Call> calls;
  std::vector<Outputs> to;
  Tensors result;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "all_gather_coalesced");
    Tensors of_ranks;
    for (const Tensors& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "shm: all_gather_coalesced: ", list.size(), " outputs for ",
                        inputs.size(), " inputs");
      of_ranks.push_back(list[i]);
    }
    check_same(of_ranks, inputs[i], "all_gather_coalesced");
    calls.push_back(call_of(Kind::kAllGather, inputs[i]));
    result.insert(result.end(), of_ranks.begin(), of_ranks.end());
    to.emplace_back(std::move(of_ranks));
  }
  return give(c10d::OpType::ALLGATHER_COALESCED, "shm:all_gather", inputs, result, options.timeout,
              asynchronous(options), [this, calls, to, from = contiguous(inputs)](const Patience& patience) {
                for (std::size_t i = 0; i < from.size(); ++i) {
                  group_->enter(calls[i]);
                  all_gather(*group_, bytes_of(from[i]), all_bytes(to[i].used()), from[i].nbytes(), kAll, patience);
                  to[i].done();
                }
              });
}

Backend::Pointer Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "shm: all_gather_into_tensor: ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  std::vector<Call> calls;
  std::vector<Tensors> to;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "all_gather_into_tensor");
    to.push_back(parts(outputs[i], size_, "all_gather_into_tensor"));
    check_same(to.back(), inputs[i], "all_gather_into_tensor");
    calls.push_back(call_of(Kind::kAllGather, inputs[i]));
  }
  return give(c10d::OpType::_ALLGATHER_BASE, "shm:all_gather_into_tensor", inputs, outputs, options.timeout,
              asynchronous(options), [this, calls, to, from = contiguous(inputs)](const Patience& patience) {
                for (std::size_t i = 0; i < from.size(); ++i) {
                  group_->enter(calls[i]);
                  all_gather(*group_, bytes_of(from[i]), all_bytes(to[i]), from[i].nbytes(), kAll, patience);
                }
              });
}

Backend::Pointer Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  only(inputs, "gather");
  check_root(options.rootRank, size_, "gather");
  Tensors to;
  if (options.rootRank == rank_) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "shm: gather takes one list of outputs on rank ", rank_);
    check_count(outputs[0].size(), size_, "gather");
    check_same(outputs[0], inputs[0], "gather");
    to = outputs[0];
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "shm: gather: requires empty output on non-root, rank ", rank_);
  }
  const Call call = call_of(Kind::kGather, inputs[0], options.rootRank);
  return give(c10d::OpType::GATHER, "shm:gather", inputs, to, options.timeout, asynchronous(options),
              [this, call, input = inputs[0].contiguous(), to = Outputs(to)](const Patience& patience) {
                group_->enter(call);
                all_gather(*group_, bytes_of(input), all_bytes(to.used()), input.nbytes(), call.root, patience);
                to.done();
              });
}

Backend::Pointer Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  only(outputs, "scatter");
  check_root(options.rootRank, size_, "scatter");
  Tensors from;
  if (options.rootRank == rank_) {
    TORCH_CHECK_VALUE(inputs.size() == 1, "shm: scatter takes one list of inputs on rank ", rank_);
    check_count(inputs[0].size(), size_, "scatter");
    check_same(inputs[0], outputs[0], "scatter");
    from = contiguous(inputs[0]);
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "shm: scatter: requires empty input on non-root, rank ", rank_);
  }
  const Call call = call_of(Kind::kScatter, outputs[0], options.rootRank);
  return give(c10d::OpType::SCATTER, "shm:scatter", from, outputs, options.timeout, asynchronous(options),
              [this, call, from, to = Outputs(outputs)](const Patience& patience) {
                group_->enter(call);
                const at::Tensor& output = to.used()[0];
                shared_memory::scatter(*group_, all_inputs(from), bytes_of(output), output.nbytes(), call.root,
                                       patience);
                to.done();
              });
}

Backend::Pointer Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "shm: reduce_scatter takes one list of inputs, not ", inputs.size());
  check_count(inputs[0].size(), size_, "reduce_scatter");
  if (uneven(inputs[0])) {
    return forwarded(c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", inputs[0],
                     gloo_->reduce_scatter(outputs, inputs, options));
  }
  check_same(inputs[0], outputs[0], "reduce_scatter");
  const Call call = reducing(Kind::kReduceScatter, outputs[0], options.reduceOp);
  const Reduction reduction = reduction_of(outputs[0], options.reduceOp);
  return give(c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", inputs[0], outputs, options.timeout,
              asynchronous(options),
              [this, call, reduction, from = contiguous(inputs[0]), to = Outputs(outputs)](const Patience& patience) {
                group_->enter(call);
                const at::Tensor& output = to.used()[0];
                shared_memory::reduce_scatter(*group_, all_inputs(from), bytes_of(output),
                                              static_cast<std::size_t>(output.numel()), reduction, patience);
                to.done();
              });
}

Backend::Pointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

Backend::Pointer Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "shm: reduce_scatter_tensor: ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  std::vector<Call> calls;
  std::vector<Tensors> from;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(outputs[i], "reduce_scatter_tensor");
    TORCH_CHECK_VALUE(outputs[i].is_contiguous(), "shm: reduce_scatter_tensor: the tensor must be contiguous");
    from.push_back(parts(inputs[i].contiguous(), size_, "reduce_scatter_tensor"));
    check_same(from.back(), outputs[i], "reduce_scatter_tensor");
    calls.push_back(reducing(Kind::kReduceScatter, outputs[i], options.reduceOp));
  }
  return give(c10d::OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter_tensor", inputs, outputs, options.timeout,
              asynchronous(options), [this, calls, from, outputs, op = options.reduceOp](const Patience& patience) {
                for (std::size_t i = 0; i < outputs.size(); ++i) {
                  group_->enter(calls[i]);
                  shared_memory::reduce_scatter(*group_, all_inputs(from[i]), bytes_of(outputs[i]),
                                                static_cast<std::size_t>(outputs[i].numel()),
                                                reduction_of(outputs[i], op), patience);
                }
              });
}

Backend::Pointer Backend::exchange(const char* title, const Tensors& shown, Tensors inputs, Tensors outputs,
                                   Tensors result, const c10d::AllToAllOptions& options) {
  check_count(inputs.size(), size_, "all_to_all");
  check_count(outputs.size(), size_, "all_to_all");
  Call call = call_of(Kind::kAllToAll, inputs[0]);
  call.bytes = 0;  // sizes may differ; they are compared later
  for (const Tensors* tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      check_tensor(tensor, "all_to_all");
      TORCH_CHECK_VALUE(tensor.scalar_type() == inputs[0].scalar_type(), "shm: all_to_all needs tensors of one dtype");
    }
  }
  return give(c10d::OpType::ALLTOALL, title, shown, std::move(result), options.timeout, asynchronous(options),
              [this, call, from = contiguous(inputs), to = Outputs(outputs)](const Patience& patience) {
                group_->enter(call);
                all_to_all(*group_, pieces(from), pieces(to.used()), patience);
                to.done();
              });
}

Backend::Pointer Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(output.is_contiguous() && input.is_contiguous(),
                    "shm: all_to_all_single: the tensors must be contiguous");
  return exchange("shm:all_to_all_single", {input}, rows(input, input_sizes, size_), rows(output, output_sizes, size_),
                  {output}, options);
}

Backend::Pointer Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return exchange("shm:all_to_all", inputs, inputs, outputs, outputs, options);
}

Backend::Pointer Backend::send(Tensors& tensors, int rank, int tag) {
  return forwarded(c10d::OpType::SEND, "shm:send", tensors, gloo_->send(tensors, rank, tag));
}

Backend::Pointer Backend::recv(Tensors& tensors, int rank, int tag) {
  return forwarded(c10d::OpType::RECV, "shm:recv", tensors, gloo_->recv(tensors, rank, tag));
}

Backend::Pointer Backend::recvAnysource(Tensors& tensors, int tag) {
  return forwarded(c10d::OpType::RECVANYSOURCE, "shm:recvAnySource", tensors, gloo_->recvAnysource(tensors, tag));
}

Backend::Pointer Backend::barrier(const c10d::BarrierOptions& options) {
  return give(c10d::OpType::BARRIER, "shm:barrier", {}, {}, options.timeout, asynchronous(options),
              [this](const Patience& patience) {
                group_->enter(Call{});
                group_->meet(patience);
              });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) {
  gloo_->monitoredBarrier(options, wait_for_all);
}

}  // namespace ddp_lab::shared_memory
