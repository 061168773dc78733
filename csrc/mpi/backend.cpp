#include "mpi/backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

#include "comm/checks.h"
#include "mpi/progress.h"

namespace ddp_lab::mpi {

namespace {

using Tensors = std::vector<at::Tensor>;
using Pointer = c10::intrusive_ptr<c10d::Work>;

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

// Starts `one(request)`.
template <typename One>
Requests start_one(const char* what, One one) {
  Requests requests(1, MPI_REQUEST_NULL);
  check(one(requests.data()), what);
  return requests;
}

// Starts `one(address, count, request)` for each piece of a tensor; `at_least_one`: also for an empty one.
template <typename One>
Requests start_pieces(const at::Tensor& tensor, const char* what, One one, bool at_least_one = false) {
  Requests requests;
  auto* const data = static_cast<std::byte*>(tensor.data_ptr());
  for (std::int64_t first = 0; first < tensor.numel() || (at_least_one && requests.empty()); first += kChunk) {
    const auto count = static_cast<int>(std::min(kChunk, tensor.numel() - first));
    requests.push_back(MPI_REQUEST_NULL);
    check(one(data + first * tensor.element_size(), count, &requests.back()), what);
  }
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
  return start_one("MPI_Ialltoallv", [&](MPI_Request* request) {
    return MPI_Ialltoallv(from.data_ptr(), sent.counts.data(), sent.firsts.data(), moved_as(from), to.data_ptr(),
                          received.counts.data(), received.firsts.data(), moved_as(to), comm, request);
  });
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

// The communicator stays until MPI ends: to free it, all ranks would have to let the group go in the same order.
class Backend final : public c10d::Backend {
 public:
  Backend(int rank, int size, std::shared_ptr<Lane> lane) : c10d::Backend(rank, size), lane_(std::move(lane)) {}

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return given_; }

  void abort() override {
    lane_->aborted = true;
    Progress::of_process().wake();
  }

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const char* const what = "mpi: broadcast";
    const at::Tensor tensor = in_place(only(tensors, what), what);
    check_root(options.rootRank, size_, what);
    return give(c10d::OpType::BROADCAST, "mpi:broadcast", tensors, tensors, options.timeout,
                [tensor, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
                  return start_pieces(tensor, "MPI_Ibcast", [&](void* data, int count, MPI_Request* request) {
                    return MPI_Ibcast(data, count, moved_as(tensor), root, comm, request);
                  });
                });
  }

  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    only(tensors, "mpi: all_reduce");
    return reduce_everywhere(c10d::OpType::ALLREDUCE, tensors, options);
  }

  Pointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_everywhere(c10d::OpType::ALLREDUCE_COALESCED, tensors, options);
  }

  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const char* const what = "mpi: reduce";
    const at::Tensor tensor = in_place(only(tensors, what), what);
    check_root(options.rootRank, size_, what);
    reduced_as(tensor);
    const MPI_Op op = operation_of(options.reduceOp, tensor.scalar_type());
    const bool here = options.rootRank == rank_;
    return give(
        c10d::OpType::REDUCE, "mpi:reduce", tensors, tensors, options.timeout,
        [tensor, op, here, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
          return start_pieces(tensor, "MPI_Ireduce", [&](void* data, int count, MPI_Request* request) {
            return MPI_Ireduce(here ? MPI_IN_PLACE : data, here ? data : nullptr, count, reduced_as(tensor), op, root,
                               comm, request);
          });
        },
        average({tensor}, here && options.reduceOp == c10d::ReduceOp::AVG));
  }

  Pointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const char* const what = "mpi: all_gather";
    const at::Tensor input = only(inputs, what).contiguous();
    const Tensors to = only_list(outputs, size_, "output", what);
    check_same(to, input, what);
    count_of(input.numel(), what);  // before memory is taken
    const at::Tensor flat = room_for(input, input.numel() * size_);
    return give(c10d::OpType::ALLGATHER, "mpi:all_gather", inputs, to, options.timeout, gather_into(flat, input, what),
                [flat, to](const Statuses&) { copy_out(flat, to); });
  }

  Pointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    const char* const what = "mpi: all_gather_into_tensor";
    check_contiguous(output, what);
    check_tensor(input, what);
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() * size_, what,
                      ": the output must have ", size_, " times the input's ", input.numel(), " elements of ",
                      input.scalar_type(), ", not ", output.numel(), " of ", output.scalar_type());
    return give(c10d::OpType::_ALLGATHER_BASE, "mpi:all_gather_into_tensor", {input}, {output}, options.timeout,
                gather_into(output, input.contiguous(), what));
  }

  Pointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const char* const what = "mpi: gather";
    const at::Tensor input = only(inputs, what).contiguous();
    const Tensors to = list_of_root(outputs, input, options.rootRank, rank_, size_, "output", what);
    const int count = count_of(input.numel(), what);
    const at::Tensor flat = room_for(input, to.empty() ? 0 : input.numel() * size_);
    return give(
        c10d::OpType::GATHER, "mpi:gather", inputs, to, options.timeout,
        [input, flat, count, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
          return start_one("MPI_Igather", [&](MPI_Request* request) {
            return MPI_Igather(input.data_ptr(), count, moved_as(input), flat.data_ptr(), count, moved_as(input), root,
                               comm, request);
          });
        },
        [flat, to](const Statuses&) { copy_out(flat, to); });
  }

  Pointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const char* const what = "mpi: scatter";
    const at::Tensor output = only(outputs, what);
    const Tensors from = list_of_root(inputs, output, options.rootRank, rank_, size_, "input", what);
    const at::Tensor flat = from.empty() ? room_for(output, 0) : flat_of(from);
    const int count = count_of(output.numel(), what);
    const at::Tensor room = room_for(output, output.numel());
    return give(
        c10d::OpType::SCATTER, "mpi:scatter", from, outputs, options.timeout,
        [flat, room, count, root = static_cast<int>(options.rootRank), comm = lane_->communicator] {
          return start_one("MPI_Iscatter", [&](MPI_Request* request) {
            return MPI_Iscatter(flat.data_ptr(), count, moved_as(room), room.data_ptr(), count, moved_as(room), root,
                                comm, request);
          });
        },
        [room, output](const Statuses&) { copy_out(room, {output}); });
  }

  Pointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const char* const what = "mpi: reduce_scatter";
    const at::Tensor output = only(outputs, what);
    check_same(only_list(inputs, size_, "input", what), output, what);
    return scatter_sum(c10d::OpType::REDUCE_SCATTER, "mpi:reduce_scatter", inputs[0], flat_of(inputs[0]), output,
                       options);
  }

  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const char* const what = "mpi: reduce_scatter_tensor";
    check_contiguous(output, what);
    check_tensor(input, what);
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && input.numel() == output.numel() * size_, what,
                      ": the input must have ", size_, " times the output's ", output.numel(), " elements of ",
                      output.scalar_type(), ", not ", input.numel(), " of ", input.scalar_type());
    return scatter_sum(c10d::OpType::_REDUCE_SCATTER_BASE, "mpi:reduce_scatter_tensor", {input}, input.contiguous(),
                       output, options);
  }

  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    const char* const what = "mpi: all_to_all_single";
    check_contiguous(output, what);
    check_contiguous(input, what);
    check_dtype(output, input, what);
    const Shares sent = shares_of(row_sizes(input, input_sizes, size_), what);
    const Shares received = shares_of(row_sizes(output, output_sizes, size_), what);
    return give(c10d::OpType::ALLTOALL_BASE, "mpi:all_to_all_single", {input}, {output}, options.timeout,
                [input, sent, output, received, comm = lane_->communicator] {
                  return exchange(input, sent, output, received, comm);
                });
  }

  Pointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const char* const what = "mpi: all_to_all";
    for (const Tensors* tensors : {&inputs, &outputs}) {
      check_count(tensors->size(), size_, what);
      for (const at::Tensor& tensor : *tensors) {
        check_tensor(tensor, what);
        check_dtype(tensor, inputs[0], what);
      }
    }
    const Shares sent = shares_of(sizes_of(inputs), what);
    const std::vector<std::int64_t> sizes = sizes_of(outputs);
    const Shares received = shares_of(sizes, what);
    const at::Tensor flat = flat_of(inputs);
    const at::Tensor room = room_for(flat, std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
    return give(
        c10d::OpType::ALLTOALL, "mpi:all_to_all", inputs, outputs, options.timeout,
        [flat, sent, room, received, comm = lane_->communicator] { return exchange(flat, sent, room, received, comm); },
        [room, outputs](const Statuses&) { copy_out(room, outputs); });
  }

  Pointer send(Tensors& tensors, int rank, int tag) override {
    const at::Tensor tensor = only(tensors, "mpi: send").contiguous();
    check_peer(rank, "mpi: send");
    auto work = c10::make_intrusive<Work>(rank_, c10d::OpType::SEND, "mpi:send", tensors, Tensors{}, given_.load());
    give_aside(work, [tensor, rank, tag, comm = lane_->communicator] {
      const auto one = [&](void* data, int count, MPI_Request* request) {
        return MPI_Isend(data, count, moved_as(tensor), rank, tag, comm, request);
      };
      return start_pieces(tensor, "MPI_Isend", one, /*at_least_one=*/true);  // an empty tensor is a message, too
    });
    return work;
  }

  Pointer recv(Tensors& tensors, int rank, int tag) override {
    check_peer(rank, "mpi: recv");
    return receive(c10d::OpType::RECV, "mpi:recv", tensors, rank, tag);
  }

  Pointer recvAnysource(Tensors& tensors, int tag) override {
    return receive(c10d::OpType::RECVANYSOURCE, "mpi:recvAnySource", tensors, MPI_ANY_SOURCE, tag);
  }

  Pointer barrier(const c10d::BarrierOptions& options) override {
    return give(c10d::OpType::BARRIER, "mpi:barrier", {}, {}, options.timeout, [comm = lane_->communicator] {
      return start_one("MPI_Ibarrier", [&](MPI_Request* request) { return MPI_Ibarrier(comm, request); });
    });
  }

 private:
  using Start = std::function<Requests()>;
  using Finish = std::function<void(const Statuses&)>;

  Pointer give(c10d::OpType kind, const char* title, const Tensors& inputs, Tensors outputs,
               std::chrono::milliseconds timeout, Start start, Finish finish = nullptr) {
    auto work = c10::make_intrusive<Work>(rank_, kind, title, inputs, std::move(outputs), ++given_);
    const std::chrono::milliseconds patience = timeout.count() > 0 ? timeout : timeout_.load();
    Progress::of_process().give({std::move(start), std::move(finish), work, lane_, true, patience});
    return work;
  }

  void give_aside(c10::intrusive_ptr<Work> work, Start start, Finish finish = nullptr) {
    Progress::of_process().give({std::move(start), std::move(finish), std::move(work), lane_, false, timeout_.load()});
  }

  void check_peer(int peer, const char* what) const {
    check_root(peer, size_, what);
    TORCH_CHECK_VALUE(peer != rank_, what, ": rank ", rank_, " is this rank itself");
  }

  // What is done when sums have arrived that are to be averages, or not.
  Finish average(const Tensors& sums, bool wanted) const {
    if (!wanted) {
      return nullptr;
    }
    return [sums, size = size_](const Statuses&) {
      for (const at::Tensor& sum : sums) {
        sum.div_(size);
      }
    };
  }

  template <typename Options>
  Pointer reduce_everywhere(c10d::OpType kind, const Tensors& tensors, const Options& options) {
    std::vector<MPI_Op> operations;
    for (const at::Tensor& tensor : tensors) {
      in_place(tensor, "mpi: all_reduce");
      reduced_as(tensor);
      operations.push_back(operation_of(options.reduceOp, tensor.scalar_type()));
    }
    return give(
        kind, "mpi:all_reduce", tensors, tensors, options.timeout,
        [tensors, operations, comm = lane_->communicator] {
          Requests requests;
          for (std::size_t i = 0; i < tensors.size(); ++i) {
            const at::Tensor& tensor = tensors[i];
            const Requests more =
                start_pieces(tensor, "MPI_Iallreduce", [&](void* data, int count, MPI_Request* request) {
                  return MPI_Iallreduce(MPI_IN_PLACE, data, count, reduced_as(tensor), operations[i], comm, request);
                });
            requests.insert(requests.end(), more.begin(), more.end());
          }
          return requests;
        },
        average(tensors, options.reduceOp == c10d::ReduceOp::AVG));
  }

  Start gather_into(const at::Tensor& flat, const at::Tensor& input, const char* what) const {
    return [input, flat, count = count_of(input.numel(), what), comm = lane_->communicator] {
      return start_one("MPI_Iallgather", [&](MPI_Request* request) {
        return MPI_Iallgather(input.data_ptr(), count, moved_as(input), flat.data_ptr(), count, moved_as(input), comm,
                              request);
      });
    };
  }

  Pointer scatter_sum(c10d::OpType kind, const char* title, const Tensors& inputs, const at::Tensor& whole,
                      const at::Tensor& output, const c10d::ReduceScatterOptions& options) {
    reduced_as(output);
    const MPI_Op op = operation_of(options.reduceOp, output.scalar_type());
    const int count = count_of(output.numel(), "mpi: reduce_scatter");
    const at::Tensor room = output.is_contiguous() ? output : room_for(output, output.numel());
    return give(
        kind, title, inputs, {output}, options.timeout,
        [whole, room, op, count, comm = lane_->communicator] {
          return start_one("MPI_Ireduce_scatter_block", [&](MPI_Request* request) {
            return MPI_Ireduce_scatter_block(whole.data_ptr(), room.data_ptr(), count, reduced_as(room), op, comm,
                                             request);
          });
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

  Pointer receive(c10d::OpType kind, const char* title, Tensors& tensors, int source, int tag) {
    const at::Tensor tensor = only(tensors, "mpi: recv");
    check_contiguous(tensor, "mpi: recv");
    TORCH_CHECK_VALUE(source != MPI_ANY_SOURCE || tensor.numel() <= kChunk, "mpi: recv from any rank takes at most ",
                      kChunk, " elements, this tensor has ", tensor.numel(), ": name the source");
    auto work = c10::make_intrusive<Received>(rank_, kind, title, tensors, tensors, given_.load());
    give_aside(
        work,
        [tensor, source, tag, comm = lane_->communicator] {
          const auto one = [&](void* data, int count, MPI_Request* request) {
            return MPI_Irecv(data, count, moved_as(tensor), source, tag, comm, request);
          };
          return start_pieces(tensor, "MPI_Irecv", one, /*at_least_one=*/true);
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

  const std::shared_ptr<Lane> lane_;
  std::atomic<std::uint64_t> given_ = 0;
  std::atomic<std::chrono::milliseconds> timeout_{std::chrono::minutes(30)};  // torch's own for MPI
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const std::vector<int>& ranks) {
  Progress& progress = Progress::of_process();
  progress.begin();
  const auto mine = std::find(ranks.begin(), ranks.end(), progress.rank());
  TORCH_CHECK_VALUE(mine != ranks.end(), "mpi: rank ", progress.rank(), " is not a member of the group");
  auto lane = std::make_shared<Lane>();
  progress.call([lane, ranks, world = progress.size()] { lane->communicator = communicator_of(ranks, world); });
  return c10::make_intrusive<Backend>(static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()),
                                      std::move(lane));
}

}  // namespace ddp_lab::mpi
