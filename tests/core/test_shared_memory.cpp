// The collectives of the backend "shm", with ranks as threads over one mapping: only so the thread sanitizer, which
// knows addresses, sees what one rank reads of another.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/shared_memory/collectives.h"
#include "comm/shared_memory/half.h"
#include "kernel_pages.h"
// After torch's headers, which have a CHECK of their own.
#undef CHECK
#include "check.h"

namespace {

using namespace ddp_lab::shared_memory;
using Op = c10d::ReduceOp;
using Values = std::vector<std::int32_t>;
using namespace std::chrono_literals;

// Numbers of elements: none, one, the largest that one round reduces, and more; a chunk, and beyond a slot.
constexpr std::array<std::size_t, 6> kCounts{0, 1, 2048, 2049, (512 << 10) / 4, (1 << 20) / 4 + 3};
const Reduction kSum{at::kInt, Op::SUM, sizeof(std::int32_t)};

WaitPolicy policy(std::chrono::milliseconds timeout = 5min, std::function<void()> look = nullptr) {
  return {std::chrono::steady_clock::now() + timeout, timeout, std::move(look)};
}

// Runs body(group) on `size` ranks, each in a thread; throws what the first of them threw.
void on_ranks(int size, const std::function<void(Group&)>& body, bool pools = false) {
  const auto segment = std::make_shared<const Segment>(Segment::create(Group::bytes_for(size)));
  const std::vector<int> pids(size, getpid());
  std::vector<int> global(size);
  std::iota(global.begin(), global.end(), 0);
  std::vector<std::exception_ptr> thrown(size);
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        Group group(segment, rank, pids, global,
                    pools ? std::vector<PoolView>(size, Pool::own()->view()) : std::vector<PoolView>());
        body(group);
      } catch (...) {
        thrown[rank] = std::current_exception();
      }
    });
  }
  ranks.clear();
  for (const auto& error : thrown) {
    if (error) std::rethrow_exception(error);
  }
}

void on_some_sizes(const std::function<void(Group&)>& body) {
  for (const int size : {2, 3, 4}) on_ranks(size, body);
}

std::int32_t value(int rank, std::size_t i) { return rank * 1000 + static_cast<std::int32_t>(i % 97); }

Values values(int rank, std::size_t count) {
  Values made(count);
  for (std::size_t i = 0; i < count; ++i) made[i] = value(rank, i);
  return made;
}

Values sums(int size, std::size_t count) {
  Values made(count);
  for (int rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) made[i] += value(rank, i);
  }
  return made;
}

template <typename T>
std::byte* bytes(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

Call call(Kind kind, std::size_t count = 0, int root = -1) {
  Call made;
  made.kind = kind;
  made.bytes = count * sizeof(std::int32_t);
  made.root = root;
  made.dtype = static_cast<std::uint8_t>(at::kInt);
  return made;
}

void all_reduced(Group& group, std::size_t count, int root) {
  Values data = values(group.rank(), count);
  group.enter(call(root == kAll ? Kind::kAllReduce : Kind::kReduce, count, root));
  all_reduce(group, {bytes(data), count * sizeof(data[0])}, kSum, root, policy());
  CHECK((root != kAll && root != group.rank()) || data == sums(group.size(), count));
}

void broadcasted(Group& group, std::size_t count, int root) {
  Values data = values(group.rank(), count);
  group.enter(call(Kind::kBroadcast, count, root));
  broadcast(group, bytes(data), count * sizeof(data[0]), root, policy());
  CHECK(data == values(root, count));
}

void all_gathered(Group& group, std::size_t count, int root) {
  Values data = values(group.rank(), count);
  std::vector<Values> gathered;
  std::vector<std::byte*> outputs;
  if (root == kAll || root == group.rank()) gathered.resize(group.size(), Values(count));
  for (Values& one : gathered) outputs.push_back(bytes(one));
  group.enter(call(root == kAll ? Kind::kAllGather : Kind::kGather, count, root));
  all_gather(group, bytes(data), outputs, count * sizeof(data[0]), root, policy());
  for (std::size_t rank = 0; rank < gathered.size(); ++rank) CHECK(gathered[rank] == values(rank, count));
}

// What rank `from` has for rank `to`.
Values between(int from, int to, std::size_t count) { return values(10 * from + to, count); }

void scattered(Group& group, std::size_t count, int root) {
  std::vector<Values> parts;
  std::vector<const std::byte*> inputs;
  for (int rank = 0; group.rank() == root && rank < group.size(); ++rank) parts.push_back(between(root, rank, count));
  for (Values& part : parts) inputs.push_back(bytes(part));
  Values output(count);
  group.enter(call(Kind::kScatter, count, root));
  scatter(group, inputs, bytes(output), count * sizeof(output[0]), root, policy());
  CHECK(output == between(root, group.rank(), count));
}

void reduce_scattered(Group& group, std::size_t count) {
  std::vector<Values> parts;
  std::vector<const std::byte*> inputs;
  for (int rank = 0; rank < group.size(); ++rank) parts.push_back(between(group.rank(), rank, count));
  for (Values& part : parts) inputs.push_back(bytes(part));
  Values output(count), expected(count);
  group.enter(call(Kind::kReduceScatter, count));
  reduce_scatter(group, inputs, bytes(output), count, kSum, policy());
  for (int rank = 0; rank < group.size(); ++rank) {
    const Values theirs = between(rank, group.rank(), count);
    std::transform(theirs.begin(), theirs.end(), expected.begin(), expected.begin(), std::plus<>());
  }
  CHECK(output == expected);
}

// Of every rank, `count` elements and one more for each number of the receiver; one rank is sent nothing.
std::size_t count_to(int to, std::size_t count) { return to == 1 ? 0 : count + static_cast<std::size_t>(to); }

void exchanged(Group& group, std::size_t count) {
  std::vector<Values> sent, received;
  std::vector<Piece> inputs, outputs;
  for (int rank = 0; rank < group.size(); ++rank) {
    sent.push_back(between(group.rank(), rank, count_to(rank, count)));
    received.emplace_back(count_to(group.rank(), count));
  }
  for (Values& one : sent) inputs.push_back({bytes(one), one.size() * sizeof(one[0])});
  for (Values& one : received) outputs.push_back({bytes(one), one.size() * sizeof(one[0])});
  group.enter(call(Kind::kAllToAll));
  all_to_all(group, inputs, outputs, policy());
  for (int rank = 0; rank < group.size(); ++rank) {
    CHECK(received[rank] == between(rank, group.rank(), count_to(group.rank(), count)));
  }
}

void met(Group& group) {
  group.enter(Call{});
  group.barrier(policy());
}

// One after the other, so that each uses the slots that the one before has used.
void all_kinds(Group& group, std::size_t count) {
  const int last = group.size() - 1;
  all_reduced(group, count, kAll);
  broadcasted(group, count, last);
  all_reduced(group, count, last);
  all_gathered(group, count, kAll);
  met(group);
  all_gathered(group, count, 0);
  scattered(group, count, last);
  reduce_scattered(group, count);
  exchanged(group, count);
}

// All-reduces without end; returns the reason for which they ended.
std::string until_broken(Group& group, std::atomic<int>& done, std::size_t count) {
  while (true) {
    const std::string why = check::thrown<GroupError>([&] { all_reduced(group, count, kAll); });
    if (!why.empty()) return why;
    ++done;
  }
}

// A reduction of three arrays, and of two, against its definition. T: a number that is combined as a W.
template <typename T, typename W, typename Combine>
void reduces(at::ScalarType dtype, Op::RedOpType op, Combine combine) {
  constexpr std::size_t kElements = 2500;  // more than a block, and no multiple of a vector
  std::vector<std::vector<T>> arrays(3, std::vector<T>(kElements));
  for (std::size_t i = 0; i < kElements; ++i) {
    for (std::size_t rank = 0; rank < 3; ++rank) {
      arrays[rank][i] = static_cast<T>(static_cast<W>((i * (rank + 3)) % 61) / static_cast<W>(3));
    }
  }
  for (std::size_t size = 2; size <= 3; ++size) {
    std::vector<const std::byte*> sources;
    for (std::size_t rank = 0; rank < size; ++rank) sources.push_back(bytes(arrays[rank]));
    std::vector<T> result(kElements);
    reduce(bytes(result), sources, kElements, dtype, op);
    for (std::size_t i = 0; i < kElements; ++i) {
      W expected = static_cast<W>(arrays[0][i]);
      for (std::size_t rank = 1; rank < size; ++rank) expected = combine(expected, static_cast<W>(arrays[rank][i]));
      if (op == Op::AVG) expected = expected / static_cast<W>(size);
      CHECK(result[i] == static_cast<T>(expected));
    }
  }
}

template <typename T, typename W = T>
void reduces_numbers(at::ScalarType dtype) {
  reduces<T, W>(dtype, Op::SUM, [](W a, W b) { return static_cast<W>(a + b); });
  reduces<T, W>(dtype, Op::PRODUCT, [](W a, W b) { return static_cast<W>(a * b); });
  reduces<T, W>(dtype, Op::MIN, [](W a, W b) { return std::min(a, b); });
  reduces<T, W>(dtype, Op::MAX, [](W a, W b) { return std::max(a, b); });
}

template <typename T, typename W>
void reduces_floats(at::ScalarType dtype) {
  reduces_numbers<T, W>(dtype);
  reduces<T, W>(dtype, Op::AVG, [](W a, W b) { return a + b; });
}

template <typename T>
void reduces_integers(at::ScalarType dtype) {
  reduces_numbers<T>(dtype);
  reduces<T, T>(dtype, Op::BAND, [](T a, T b) { return static_cast<T>(a & b); });
  reduces<T, T>(dtype, Op::BOR, [](T a, T b) { return static_cast<T>(a | b); });
  reduces<T, T>(dtype, Op::BXOR, [](T a, T b) { return static_cast<T>(a ^ b); });
}

// Every number of a 16-bit type, NaN apart: widened, narrowed again, and added to those that lie at other places.
template <typename T>
void converts_all() {
  constexpr std::size_t kAllOfThem = 1 << 16;
  std::vector<T> all(kAllOfThem), back(kAllOfThem), others(kAllOfThem), added(kAllOfThem);
  std::vector<float> wide(kAllOfThem);
  for (std::size_t i = 0; i < kAllOfThem; ++i) {
    all[i] = T(static_cast<std::uint16_t>(i), T::from_bits());
    others[i] = T(static_cast<std::uint16_t>(i * 40503 + 7), T::from_bits());
  }
  widen(all.data(), wide.data(), kAllOfThem);
  narrow(wide.data(), back.data(), kAllOfThem);
  add(all.data(), others.data(), added.data(), kAllOfThem);
  for (std::size_t i = 0; i < kAllOfThem; ++i) {
    const float number = static_cast<float>(all[i]);
    const float sum = number + static_cast<float>(others[i]);
    CHECK(number != number ? wide[i] != wide[i] && back[i] != back[i] : wide[i] == number && back[i].x == all[i].x);
    CHECK(sum != sum ? added[i] != added[i] : added[i].x == T(sum).x);
  }
  for (std::size_t i = 0; i < kAllOfThem; ++i) wide[i] = static_cast<float>(i) * 1.0009765625e-3F + 1.0F;
  narrow(wide.data(), back.data(), kAllOfThem);
  for (std::size_t i = 0; i < kAllOfThem; ++i) CHECK(back[i].x == T(wide[i]).x);
}

}  // namespace

TEST("every collective gives the right numbers, of sizes from none to beyond a slot, on 2 to 4 ranks") {
  on_some_sizes([](Group& group) {
    for (const std::size_t count : kCounts) all_kinds(group, count);
  });
}

TEST("many small collectives in a row, with ranks that lag behind by turns") {
  on_some_sizes([](Group& group) {
    for (int turn = 0; turn < 200; ++turn) {
      if (turn % group.size() == group.rank()) {
        for (int i = 0; i < 50; ++i) std::this_thread::yield();
      }
      all_reduced(group, 3, kAll);
      broadcasted(group, 3, turn % group.size());
    }
  });
}

TEST("tensors in pools are reduced where they are: those of all ranks, of some, of none") {
  for (const int size : {2, 3, 4}) {
    for (const std::size_t count : kCounts) {
      std::vector<at::Tensor> tensors;
      for (int rank = 0; rank < size; ++rank) {
        tensors.push_back(Pool::own()->allocate(static_cast<std::int64_t>(std::max<std::size_t>(count, 1)), at::kInt));
      }
      const auto reduced = [&](Group& group, bool in_pool) {
        Values own = values(group.rank(), count);
        const std::size_t bytes_of_all = count * sizeof(own[0]);
        std::byte* const data = in_pool ? static_cast<std::byte*>(tensors[group.rank()].data_ptr()) : bytes(own);
        std::copy_n(bytes(own), bytes_of_all, data);
        group.enter(call(Kind::kAllReduce, count), data);
        all_reduce(group, {data, bytes_of_all}, kSum, kAll, policy());
        const Values expected = sums(group.size(), count);
        CHECK(std::memcmp(data, expected.data(), bytes_of_all) == 0 || count == 0);
        std::fill_n(data, bytes_of_all, std::byte{});  // its owner's again
      };
      const auto all_ways = [&](Group& group) {
        reduced(group, true);
        reduced(group, group.rank() == 1);
        reduced(group, true);
        reduced(group, false);
      };
      on_ranks(size, all_ways, true);
    }
  }
}

TEST("a rank may end the group in the middle of anything: all others learn why, once and for all") {
  for (const std::size_t count : kCounts) {
    for (const int size : {2, 3, 4}) {
      std::atomic<int> done{0};
      std::atomic<Group*> first{nullptr};
      std::atomic<bool> over{false};
      std::jthread ends([&] {
        while (first.load() == nullptr || done.load() < size) std::this_thread::yield();
        first.load()->break_off("enough");
        over = true;
      });
      on_ranks(size, [&](Group& group) {
        if (group.rank() == 0) first = &group;
        const std::string why = until_broken(group, done, count);
        while (!over) std::this_thread::yield();  // the group lives so long
        CHECK(why == "shm: enough" && group.broken());
        CHECK(check::thrown<GroupError>([&] { group.enter(Call{}); }) == "shm: enough");
      });
    }
  }
}

TEST("of several ranks that end the group at once, one gives the reason") {
  for (int turn = 0; turn < 50; ++turn) {
    std::array<std::string, 4> reasons;
    on_ranks(4, [&](Group& group) {
      met(group);
      reasons[group.rank()] =
          check::thrown<GroupError>([&] { group.fail("because of rank " + std::to_string(group.rank())); });
    });
    CHECK(reasons[0].starts_with("shm: because of rank "));
    CHECK(std::all_of(reasons.begin(), reasons.end(), [&](const std::string& one) { return one == reasons[0]; }));
  }
}

TEST("ranks that call different operations, or send what is not expected, are told which") {
  on_some_sizes([](Group& group) {
    met(group);
    const std::string why = check::thrown<GroupError>([&] {
      group.rank() == 1 ? broadcasted(group, 1, 0) : all_reduced(group, 1, kAll);
      met(group);
    });
    CHECK(why.find("ranks called different operations") != std::string::npos);
  });
  on_some_sizes([](Group& group) {
    std::vector<Piece> nothing(group.size(), Piece{nullptr, 0});
    std::array<std::byte, 8> byte{};
    std::vector<Piece> more = nothing;
    if (group.rank() == 1) more[0] = {byte.data(), byte.size()};
    group.enter(call(Kind::kAllToAll));
    const std::string why = check::thrown<GroupError>([&] { all_to_all(group, more, nothing, policy()); });
    CHECK(why == "shm: rank 1 sends 8 B to rank 0, which expects 0 B, in all_to_all");
  });
}

TEST("a rank that waits too long, or is interrupted, ends the group") {
  on_some_sizes([](Group& group) {
    met(group);
    if (group.rank() == 0) return;  // never comes
    group.enter(Call{});
    const std::string why = check::thrown<GroupError>([&] { group.barrier(policy(1ms)); });
    CHECK(why.starts_with("shm: Timed out waiting 1ms"));
  });
  on_some_sizes([](Group& group) {
    met(group);
    if (group.rank() == 0) return;
    group.enter(Call{});
    const auto interrupt = [&] {
      if (group.rank() == 1) throw std::runtime_error("interrupt");
    };
    const std::string why = check::thrown<std::runtime_error>([&] { group.barrier(policy(5min, interrupt)); });
    CHECK(why == "interrupt" || why == "shm: rank 1 was interrupted in barrier #2");
  });
}

TEST("where pages have 64 KiB, what one tensor of a pool gives back is no other one's") {
  const kernel_pages::Of pages(65536);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor first = Pool::own()->allocate(1, at::kFloat);
    const at::Tensor second = Pool::own()->allocate(1, at::kFloat);
    const auto place = [](const at::Tensor& one) { return *Pool::own()->offset_of(one.data_ptr(), one.nbytes()); };
    CHECK(place(second) - place(first) == 65536);
  }
}

TEST("every dtype is reduced as it is defined") {
  reduces_floats<float, float>(at::kFloat);
  reduces_floats<double, double>(at::kDouble);
  reduces_floats<c10::Half, float>(at::kHalf);
  reduces_floats<c10::BFloat16, float>(at::kBFloat16);
  reduces_integers<std::uint8_t>(at::kByte);
  reduces_integers<std::int8_t>(at::kChar);
  reduces_integers<std::int16_t>(at::kShort);
  reduces_integers<std::int32_t>(at::kInt);
  reduces_integers<std::int64_t>(at::kLong);
}

TEST("all numbers of 16 bits are widened, rounded and added as torch does, whatever the processor has") {
  converts_all<c10::Half>();
  converts_all<c10::BFloat16>();
}

int main() { return check::run(); }
