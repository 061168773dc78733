#include "mpi/backend.h"

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

namespace ddp_lab::mpi {

namespace {

using Tensors = Backend::Tensors;

// Elements of one message; larger tensors go in several.
constexpr std::int64_t kChunk = std::int64_t{1} << 24;

// A receive, which also tells from whom.
class Received : public Work {
 public:
  using Work::Work;
  int sourceRank() const override { return source_; }
  void came_from(int source) { source_ = source; }

 private:
  int source_ = -1;
};

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "mpi: ", what, " needs tensors on the CPU, this one is on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "mpi: ", what, " needs dense tensors");
}

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "mpi: ", what, " takes one tensor, not ", tensors.size());
  check_tensor(tensors[0], what);
  return tensors[0];
}

// In place: elements may lie in any order, as long as they fill a piece of memory.
const at::Tensor& in_place(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "mpi: Tensors must be contiguous: ", what,
                    " works in place, and this one of shape ", tensor.sizes(), " has strides ", tensor.strides());
  return tensor;
}

void check_contiguous(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "mpi: ", what, ": the tensor must be contiguous");
}

void check_like(const at::Tensor& tensor, const at::Tensor& like, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel(), "mpi: ", what,
                    " needs tensors of one dtype and size: one has ", tensor.numel(), " elements of ",
                    tensor.scalar_type(), ", another ", like.numel(), " of ", like.scalar_type());
}

// One flat tensor of what goes to, or comes from, each rank.
at::Tensor flat_of(const Tensors& tensors) {
  Tensors flat;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(flat),
                 [](const at::Tensor& tensor) { return tensor.detach().reshape({-1}); });
  return at::cat(flat);
}

at::Tensor room_for(const at::Tensor& like, std::int64_t elements) {
  return at::empty({elements}, like.options().requires_grad(false));
}

void copy_out(const at::Tensor& flat, const Tensors& tensors) {
  std::int64_t first = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(flat.narrow(0, first, tensor.numel()).view(tensor.sizes()));
    first += tensor.numel();
  }
}

// Starts `one(address, count, request)` for each piece of a tensor.
template <typename One>
void start_pieces(const at::Tensor& tensor, Requests& requests, const char* what, One one) {
  auto* const data = static_cast<std::byte*>(tensor.data_ptr());
  for (std::int64_t first = 0; first < tensor.numel(); first += kChunk) {
    const auto count = static_cast<int>(std::min(kChunk, tensor.numel() - first));
    requests.push_back(MPI_REQUEST_NULL);
    check(one(data + first * tensor.element_size(), count, &requests.back()), what);
  }
}

Requests reduce_everywhere(const at::Tensor& tensor, MPI_Op op, MPI_Comm comm) {
  Requests requests;
  start_pieces(tensor, requests, "MPI_Iallreduce", [&](void* data, int count, MPI_Request* request) {
    return MPI_Iallreduce(MPI_IN_PLACE, data, count, reduced_as(tensor), op, comm, request);
  });
  return requests;
}

// What elements go to each rank, or come from it, as MPI_Alltoallv wants it.
struct Shares {
  std::vector<int> counts;
  std::vector<int> firsts;
};

Shares shares_of(const std::vector<std::int64_t>& elements, const char* what) {
  Shares shares;
  std::int64_t first = 0;
  for (const std::int64_t each : elements) {
    shares.counts.push_back(count_of(each, what));
    shares.firsts.push_back(count_of(first, what));
    first += each;
  }
  return shares;
}

std::vector<std::int64_t> sizes_of(const Tensors& tensors) {
  std::vector<std::int64_t> sizes;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(sizes),
                 [](const at::Tensor& tensor) { return tensor.numel(); });
  return sizes;
}

// The same for rows of one tensor; without `rows` as many for each.
std::vector<std::int64_t> row_sizes(const at::Tensor& tensor, const std::vector<std::int64_t>& rows, int size) {
  c10d::checkSplitSizes(rows, tensor, size);
  if (rows.empty()) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), tensor.numel() / size);
  }
  const std::int64_t row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
  std::vector<std::int64_t> sizes;
  std::transform(rows.begin(), rows.end(), std::back_inserter(sizes), [&](std::int64_t count) { return count * row; });
  return sizes;
}

Requests exchange(const at::Tensor& from, const Shares& sent, const at::Tensor& to, const Shares& received,
                  MPI_Comm comm) {
  Requests requests(1, MPI_REQUEST_NULL);
  check(MPI_Ialltoallv(from.data_ptr(), sent.counts.data(), sent.firsts.data(), moved_as(from), to.data_ptr(),
                       received.counts.data(), received.firsts.data(), moved_as(to), comm, requests.data()),
        "MPI_Ialltoallv");
  return requests;
}

// The same on all members, whatever else they are members of.
int tag_of(const std::vector<int>& ranks) {
  constexpr int kTags = 32767;  // the fewest that MPI promises
  return std::accumulate(ranks.begin(), ranks.end(), 17, [](int hash, int rank) { return (hash * 31 + rank) % kTags; });
}

MPI_Comm communicator_of(const std::vector<int>& ranks, int world) {
  MPI_Comm made = MPI_COMM_NULL;
  std::vector<int> all(static_cast<std::size_t>(world));
  std::iota(all.begin(), all.end(), 0);
  if (ranks == all) {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &made), "MPI_Comm_dup");
  } else {
    MPI_Group of_world = MPI_GROUP_NULL;
    MPI_Group members = MPI_GROUP_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &of_world), "MPI_Comm_group");
    check(MPI_Group_incl(of_world, static_cast<int>(ranks.size()), ranks.data(), &members), "MPI_Group_incl");
    check(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag_of(ranks), &made), "MPI_Comm_create_group");
    check(MPI_Group_free(&members), "MPI_Group_free");
    check(MPI_Group_free(&of_world), "MPI_Group_free");
  }
  check(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return made;
}

}  // namespace

c10::intrusive_ptr<Backend> Backend::create(const std::vector<int>& ranks) {
  Progress& progress = Progress::of_process();
  progress.begin();
  const auto mine = std::find(ranks.begin(), ranks.end(), progress.rank());
  TORCH_CHECK_VALUE(mine != ranks.end(), "mpi: rank ", progress.rank(), " is no member of the group");
  auto lane = std::make_shared<Lane>();
  progress.call([lane, ranks, world = progress.size()] { lane->communicator = communicator_of(ranks, world); });
  return c10::make_intrusive<Backend>(static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()),
                                      std::move(lane));
}

// The communicator stays until MPI ends: to free it, all ranks would have to let the group go in the same order.
Backend::Backend(int rank, int size, std::shared_ptr<Lane> lane) : c10d::Backend(rank, size), lane_(std::move(lane)) {}

void Backend::abort() {
  lane_->aborted = true;
  Progress::of_process().wake();
}

void Backend::check_root(std::int64_t root, const char* what) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, "mpi: ", what, ": there is no rank ", root, " in a group of ", size_);
}

void Backend::check_peer(int peer, const char* what) const {
  check_root(peer, what);
  TORCH_CHECK_VALUE(peer != rank_, "mpi: ", what, ": rank ", rank_, " is this rank itself");
}

void Backend::check_count(std::size_t found, const char* what) const {
  TORCH_CHECK_VALUE(found == static_cast<std::size_t>(size_), "mpi: ", what, " needs a tensor for each of ", size_,
                    " ranks, not ", found);
}

Backend::Pointer Backend::give(c10d::OpType kind, const char* title, const Tensors& inputs, Tensors outputs,
                               std::chrono::milliseconds timeout, Start start, Finish finish) {
  auto work = c10::make_intrusive<Work>(rank_, kind, title, inputs, std::move(outputs), ++given_);
  const std::chrono::milliseconds patience = timeout.count() > 0 ? timeout : timeout_.load();
  Progress::of_process().give({std::move(start), std::move(finish), work, lane_, true, patience});
  return work;
}

void Backend::give_aside(c10::intrusive_ptr<Work> work, Start start, Finish finish) {
  Progress::of_process().give({std::move(start), std::move(finish), std::move(work), lane_, false, timeout_.load()});
}

// -- operations

Backend::Pointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = in_place(only(tensors, "broadcast"), "broadcast");
  check_root(options.rootRank, "broadcast");
  return give(c10d::OpType::BROADCAST, "mpi:broadcast", tensors, tensors, options.timeout,
              [tensor, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
                Requests requests;
                start_pieces(tensor, requests, "MPI_Ibcast", [&](void* data, int count, MPI_Request* request) {
                  return MPI_Ibcast(data, count, moved_as(tensor), root, comm, request);
                });
                return requests;
              });
}

Backend::Pointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only(tensors, "all_reduce");
  c10d::AllreduceCoalescedOptions same;
  same.reduceOp = options.reduceOp;
  same.timeout = options.timeout;
  return allreduce_coalesced(tensors, same);
}

Backend::Pointer Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<MPI_Op> operations;
  for (const at::Tensor& tensor : tensors) {
    in_place(tensor, "all_reduce");
    reduced_as(tensor);
    operations.push_back(operation_of(options.reduceOp, tensor.scalar_type()));
  }
  const auto kind = tensors.size() == 1 ? c10d::OpType::ALLREDUCE : c10d::OpType::ALLREDUCE_COALESCED;
  return give(
      kind, "mpi:all_reduce", tensors, tensors, options.timeout,
      [tensors, operations, comm = lane_->communicator] {
        Requests requests;
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          const Requests more = reduce_everywhere(tensors[i], operations[i], comm);
          requests.insert(requests.end(), more.begin(), more.end());
        }
        return requests;
      },
      [tensors, average = options.reduceOp == c10d::ReduceOp::AVG, size = size_](const Statuses&) {
        for (const at::Tensor& tensor : tensors) {
          if (average) {
            tensor.div_(size);
          }
        }
      });
}

Backend::Pointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = in_place(only(tensors, "reduce"), "reduce");
  check_root(options.rootRank, "reduce");
  reduced_as(tensor);
  const MPI_Op op = operation_of(options.reduceOp, tensor.scalar_type());
  const bool here = options.rootRank == rank_;
  return give(
      c10d::OpType::REDUCE, "mpi:reduce", tensors, tensors, options.timeout,
      [tensor, op, here, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
        Requests requests;
        start_pieces(tensor, requests, "MPI_Ireduce", [&](void* data, int count, MPI_Request* request) {
          return MPI_Ireduce(here ? MPI_IN_PLACE : data, here ? data : nullptr, count, reduced_as(tensor), op, root,
                             comm, request);
        });
        return requests;
      },
      [tensor, average = here && options.reduceOp == c10d::ReduceOp::AVG, size = size_](const Statuses&) {
        if (average) {
          tensor.div_(size);
        }
      });
}

Backend::Pointer Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  const at::Tensor input = only(inputs, "all_gather").contiguous();
  TORCH_CHECK_VALUE(outputs.size() == 1, "mpi: all_gather takes one list of outputs, not ", outputs.size());
  const Tensors& to = outputs[0];
  check_count(to.size(), "all_gather");
  for (const at::Tensor& one : to) {
    check_like(one, input, "all_gather");
  }
  const int count = count_of(input.numel(), "all_gather");
  const at::Tensor flat = room_for(input, input.numel() * size_);
  return give(
      c10d::OpType::ALLGATHER, "mpi:all_gather", inputs, to, options.timeout,
      [input, flat, count, comm = lane_->communicator] {
        Requests requests(1, MPI_REQUEST_NULL);
        check(MPI_Iallgather(input.data_ptr(), count, moved_as(input), flat.data_ptr(), count, moved_as(input), comm,
                             requests.data()),
              "MPI_Iallgather");
        return requests;
      },
      [flat, to](const Statuses&) { copy_out(flat, to); });
}

Backend::Pointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  check_contiguous(output, "all_gather_into_tensor");
  check_tensor(input, "all_gather_into_tensor");
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() * size_,
                    "mpi: all_gather_into_tensor: the output must have ", size_, " times the input's ", input.numel(),
                    " elements of ", input.scalar_type(), ", not ", output.numel(), " of ", output.scalar_type());
  const int count = count_of(input.numel(), "all_gather_into_tensor");
  return give(c10d::OpType::_ALLGATHER_BASE, "mpi:all_gather_into_tensor", {input}, {output}, options.timeout,
              [from = input.contiguous(), output, count, comm = lane_->communicator] {
                Requests requests(1, MPI_REQUEST_NULL);
                check(MPI_Iallgather(from.data_ptr(), count, moved_as(from), output.data_ptr(), count, moved_as(from),
                                     comm, requests.data()),
                      "MPI_Iallgather");
                return requests;
              });
}

Backend::Pointer Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor input = only(inputs, "gather").contiguous();
  check_root(options.rootRank, "gather");
  Tensors to;
  at::Tensor flat;
  if (options.rootRank == rank_) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "mpi: gather takes one list of outputs on rank ", rank_);
    to = outputs[0];
    check_count(to.size(), "gather");
    for (const at::Tensor& one : to) {
      check_like(one, input, "gather");
    }
    flat = room_for(input, input.numel() * size_);
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "mpi: gather: requires empty output on non-root, rank ", rank_);
  }
  const int count = count_of(input.numel(), "gather");
  return give(
      c10d::OpType::GATHER, "mpi:gather", inputs, to, options.timeout,
      [input, flat, count, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
        Requests requests(1, MPI_REQUEST_NULL);
        void* const room = flat.defined() ? flat.data_ptr() : nullptr;
        check(MPI_Igather(input.data_ptr(), count, moved_as(input), room, count, moved_as(input), root, comm,
                          requests.data()),
              "MPI_Igather");
        return requests;
      },
      [flat, to](const Statuses&) { copy_out(flat, to); });
}

Backend::Pointer Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor output = only(outputs, "scatter");
  check_root(options.rootRank, "scatter");
  at::Tensor flat;
  Tensors from;
  if (options.rootRank == rank_) {
    TORCH_CHECK_VALUE(inputs.size() == 1, "mpi: scatter takes one list of inputs on rank ", rank_);
    from = inputs[0];
    check_count(from.size(), "scatter");
    for (const at::Tensor& one : from) {
      check_like(one, output, "scatter");
    }
    flat = flat_of(from);
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "mpi: scatter: requires empty input on non-root, rank ", rank_);
  }
  const int count = count_of(output.numel(), "scatter");
  const at::Tensor room = room_for(output, output.numel());
  return give(
      c10d::OpType::SCATTER, "mpi:scatter", from, outputs, options.timeout,
      [flat, room, count, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
        Requests requests(1, MPI_REQUEST_NULL);
        const void* const given = flat.defined() ? flat.data_ptr() : nullptr;
        check(MPI_Iscatter(given, count, moved_as(room), room.data_ptr(), count, moved_as(room), root, comm,
                           requests.data()),
              "MPI_Iscatter");
        return requests;
      },
      [room, output](const Statuses&) { copy_out(room, {output}); });
}

Backend::Pointer Backend::scatter_sum(c10d::OpType kind, const char* title, const Tensors& inputs,
                                      const at::Tensor& whole, const at::Tensor& output,
                                      const c10d::ReduceScatterOptions& options) {
  reduced_as(output);
  const MPI_Op op = operation_of(options.reduceOp, output.scalar_type());
  const int count = count_of(output.numel(), "reduce_scatter");
  const at::Tensor room = output.is_contiguous() ? output : room_for(output, output.numel());
  return give(
      kind, title, inputs, {output}, options.timeout,
      [whole, room, op, count, comm = lane_->communicator] {
        Requests requests(1, MPI_REQUEST_NULL);
        check(MPI_Ireduce_scatter_block(whole.data_ptr(), room.data_ptr(), count, reduced_as(room), op, comm,
                                        requests.data()),
              "MPI_Ireduce_scatter_block");
        return requests;
      },
      [room, output, average = options.reduceOp == c10d::ReduceOp::AVG, size = size_](const Statuses&) {
        if (average) {
          room.div_(size);
        }
        if (!room.is_same(output)) {
          copy_out(room, {output});
        }
      });
}

Backend::Pointer Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "mpi: reduce_scatter takes one list of inputs, not ", inputs.size());
  check_count(inputs[0].size(), "reduce_scatter");
  for (const at::Tensor& one : inputs[0]) {
    check_like(one, output, "reduce_scatter");
  }
  return scatter_sum(c10d::OpType::REDUCE_SCATTER, "mpi:reduce_scatter", inputs[0], flat_of(inputs[0]), output,
                     options);
}

Backend::Pointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  check_contiguous(output, "reduce_scatter_tensor");
  check_tensor(input, "reduce_scatter_tensor");
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && input.numel() == output.numel() * size_,
                    "mpi: reduce_scatter_tensor: the input must have ", size_, " times the output's ", output.numel(),
                    " elements of ", output.scalar_type(), ", not ", input.numel(), " of ", input.scalar_type());
  return scatter_sum(c10d::OpType::_REDUCE_SCATTER_BASE, "mpi:reduce_scatter_tensor", {input}, input.contiguous(),
                     output, options);
}

Backend::Pointer Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  const char* const what = "all_to_all_single";
  check_contiguous(output, what);
  check_contiguous(input, what);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "mpi: all_to_all_single needs tensors of one dtype");
  const Shares sent = shares_of(row_sizes(input, input_sizes, size_), what);
  const Shares received = shares_of(row_sizes(output, output_sizes, size_), what);
  return give(c10d::OpType::ALLTOALL_BASE, "mpi:all_to_all_single", {input}, {output}, options.timeout,
              [input, sent, output, received, comm = lane_->communicator] {
                return exchange(input, sent, output, received, comm);
              });
}

Backend::Pointer Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_count(inputs.size(), "all_to_all");
  check_count(outputs.size(), "all_to_all");
  for (const Tensors* tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      check_tensor(tensor, "all_to_all");
      TORCH_CHECK_VALUE(tensor.scalar_type() == inputs[0].scalar_type(), "mpi: all_to_all needs tensors of one dtype");
    }
  }
  const Shares sent = shares_of(sizes_of(inputs), "all_to_all");
  const std::vector<std::int64_t> sizes = sizes_of(outputs);
  const Shares received = shares_of(sizes, "all_to_all");
  const at::Tensor flat = flat_of(inputs);
  const at::Tensor room = room_for(flat, std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  return give(
      c10d::OpType::ALLTOALL, "mpi:all_to_all", inputs, outputs, options.timeout,
      [flat, sent, room, received, comm = lane_->communicator] { return exchange(flat, sent, room, received, comm); },
      [room, outputs](const Statuses&) { copy_out(room, outputs); });
}

Backend::Pointer Backend::send(Tensors& tensors, int rank, int tag) {
  const at::Tensor tensor = only(tensors, "send").contiguous();
  check_peer(rank, "send");
  auto work = c10::make_intrusive<Work>(rank_, c10d::OpType::SEND, "mpi:send", tensors, Tensors{}, given_.load());
  give_aside(work, [tensor, rank, tag, comm = lane_->communicator] {
    Requests requests;
    start_pieces(tensor, requests, "MPI_Isend", [&](void* data, int count, MPI_Request* request) {
      return MPI_Isend(data, count, moved_as(tensor), rank, tag, comm, request);
    });
    if (requests.empty()) {  // an empty tensor is a message, too
      requests.push_back(MPI_REQUEST_NULL);
      check(MPI_Isend(nullptr, 0, MPI_BYTE, rank, tag, comm, requests.data()), "MPI_Isend");
    }
    return requests;
  });
  return work;
}

Backend::Pointer Backend::recv(Tensors& tensors, int rank, int tag) {
  check_peer(rank, "recv");
  return receive(c10d::OpType::RECV, "mpi:recv", tensors, rank, tag);
}

Backend::Pointer Backend::recvAnysource(Tensors& tensors, int tag) {
  return receive(c10d::OpType::RECVANYSOURCE, "mpi:recvAnySource", tensors, MPI_ANY_SOURCE, tag);
}

Backend::Pointer Backend::receive(c10d::OpType kind, const char* title, Tensors& tensors, int source, int tag) {
  const at::Tensor tensor = only(tensors, "recv");
  check_contiguous(tensor, "recv");
  if (source == MPI_ANY_SOURCE) {
    TORCH_CHECK_VALUE(tensor.numel() <= kChunk, "mpi: recv from any rank takes at most ", kChunk,
                      " elements, this tensor has ", tensor.numel(), ": name the source");
  }
  auto work = c10::make_intrusive<Received>(rank_, kind, title, tensors, tensors, given_.load());
  give_aside(
      work,
      [tensor, source, tag, comm = lane_->communicator] {
        Requests requests;
        start_pieces(tensor, requests, "MPI_Irecv", [&](void* data, int count, MPI_Request* request) {
          return MPI_Irecv(data, count, moved_as(tensor), source, tag, comm, request);
        });
        if (requests.empty()) {
          requests.push_back(MPI_REQUEST_NULL);
          check(MPI_Irecv(nullptr, 0, MPI_BYTE, source, tag, comm, requests.data()), "MPI_Irecv");
        }
        return requests;
      },
      [work = work.get(), tensor](const Statuses& statuses) {
        work->came_from(statuses.at(0).MPI_SOURCE);
        std::int64_t found = 0;
        for (const MPI_Status& status : statuses) {
          int count = 0;
          check(MPI_Get_count(&status, moved_as(tensor), &count), "MPI_Get_count");
          found += count;
        }
        TORCH_CHECK_VALUE(found == tensor.numel(), "mpi: recv of ", tensor.numel(), " elements from rank ",
                          statuses.at(0).MPI_SOURCE, ", which sent ", found);
      });
  return work;
}

Backend::Pointer Backend::barrier(const c10d::BarrierOptions& options) {
  return give(c10d::OpType::BARRIER, "mpi:barrier", {}, {}, options.timeout, [comm = lane_->communicator] {
    Requests requests(1, MPI_REQUEST_NULL);
    check(MPI_Ibarrier(comm, requests.data()), "MPI_Ibarrier");
    return requests;
  });
}

}  // namespace ddp_lab::mpi
