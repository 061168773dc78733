#include "mpi/progress.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <utility>

namespace ddp_lab::mpi {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook{50};
constexpr std::chrono::milliseconds kEager{2};  // after the last thing that moved; then it sleeps between two looks
constexpr std::chrono::seconds kAlert{1};
constexpr std::chrono::microseconds kShortSleep{50};
constexpr std::chrono::milliseconds kLongSleep{1};

std::exception_ptr failure(const std::string& what) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, what));
}

// MPI_Testall's answer; a failed request says so in its status.
bool all_done(Requests& requests, Statuses& statuses, const char* what) {
  int done = 0;
  const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, statuses.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const MPI_Status& status : statuses) {
      if (status.MPI_ERROR != MPI_ERR_PENDING) {
        check(status.MPI_ERROR, what);
      }
    }
  }
  check(code, what);
  return done != 0;
}

}  // namespace

Progress& Progress::of_process() {
  static Progress* const only = new Progress;  // never destroyed: its thread may wait in MPI when the process ends
  return *only;
}

void Progress::check_process() const {
  TORCH_CHECK(pid_ == getpid(), "mpi: this process was forked from one that uses MPI, so it can't use MPI");
}

void Progress::begin() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) {
      pid_ = getpid();
      moved_ = Clock::now();
      thread_ = std::thread([this] { serve(); });
    }
  }
  call([this] {
    if (size_ > 0) {
      return;
    }
    int begun = 0;
    int ended = 0;
    int provided = 0;
    check(MPI_Finalized(&ended), "MPI_Finalized");
    TORCH_CHECK(ended == 0, "mpi: MPI has been finalized in this process, and can't begin again");
    check(MPI_Initialized(&begun), "MPI_Initialized");
    if (begun == 0) {
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
      ours_ = true;
      TORCH_CHECK(provided >= MPI_THREAD_SERIALIZED, "mpi: this MPI library can't be called from a thread");
    } else {
      check(MPI_Query_thread(&provided), "MPI_Query_thread");
      TORCH_CHECK(provided >= MPI_THREAD_MULTIPLE,
                  "mpi: another library of this process has begun MPI without MPI_THREAD_MULTIPLE");
    }
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  });
}

void Progress::call(std::function<void()> action) {
  check_process();
  if (std::this_thread::get_id() == thread_.get_id()) {
    action();
    return;
  }
  const auto answer = std::make_shared<std::promise<void>>();
  std::future<void> done = answer->get_future();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!stopping_, "mpi: MPI has been finalized in this process");
    actions_.emplace_back([action = std::move(action), answer] {
      try {
        action();
        answer->set_value();
      } catch (...) {
        answer->set_exception(std::current_exception());
      }
    });
  }
  changed_.notify_one();
  while (done.wait_for(kLook) != std::future_status::ready) {
    shared_memory::look_for_signals();
  }
  done.get();
}

void Progress::give(Operation operation) {
  check_process();
  if (std::this_thread::get_id() == thread_.get_id()) {  // see [Note: one thread for MPI]
    const bool in_turn = operation.in_turn;
    const Pointer flying = start(std::move(operation), true);
    while (in_turn && !flying->ended) {
      if (!test()) {
        pause();
      }
    }
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!stopping_, "mpi: MPI has been finalized in this process");
    given_.push_back(std::move(operation));
  }
  changed_.notify_one();
}

void Progress::wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    woken_ = true;
  }
  changed_.notify_one();
}

bool Progress::end(std::chrono::milliseconds patience) {
  if (!thread_.joinable() || pid_ != getpid()) {
    return true;
  }
  const auto deadline = Clock::now() + patience;
  bool left = true;
  call([&] {
    step();
    const auto at_rest = [this] {
      std::erase_if(abandoned_, [](const Pointer& one) {
        int done = 0;
        Requests& requests = one->requests;
        const int count = static_cast<int>(requests.size());
        return MPI_Testall(count, requests.data(), &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS || done != 0;
      });
      return flying_.empty() && lanes_.empty() && abandoned_.empty();
    };
    while ((left = !at_rest()) && Clock::now() < deadline) {
      if (!step()) {
        pause();
      }
    }
    if (!left && ours_) {
      check(MPI_Finalize(), "MPI_Finalize");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  });
  thread_.join();
  return !left;
}

void Progress::serve() {
  pthread_setname_np(pthread_self(), "mpi");
  shared_memory::run_before_waiting([this] { drain(); });
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] {
        return woken_ || stopping_ || !actions_.empty() || !given_.empty() || !flying_.empty() || !lanes_.empty();
      });
      woken_ = false;
      if (stopping_) {
        return;
      }
    }
    if (!step()) {
      pause();
    }
  }
}

bool Progress::step() {
  bool moved = take();
  moved |= start_waiting();
  moved |= test();
  return moved;
}

void Progress::pause() {
  const auto quiet = Clock::now() - moved_;
  if (quiet < kEager) {
    std::this_thread::yield();
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto given = [this] { return woken_ || !actions_.empty() || !given_.empty(); };
  if (quiet < kAlert) {
    changed_.wait_for(lock, kShortSleep, given);
  } else {
    changed_.wait_for(lock, kLongSleep, given);
  }
}

bool Progress::take() {
  std::deque<std::function<void()>> actions;
  std::deque<Operation> given;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    actions.swap(actions_);
    given.swap(given_);
  }
  const bool any = !actions.empty() || !given.empty();
  for (Operation& operation : given) {
    if (!operation.in_turn) {
      start(std::move(operation), false);
      continue;
    }
    const std::shared_ptr<Lane> lane = operation.lane;
    lane->waiting.push_back(std::move(operation));
    if (std::find(lanes_.begin(), lanes_.end(), lane) == lanes_.end()) {
      lanes_.push_back(lane);
    }
  }
  for (const std::function<void()>& action : actions) {
    action();
  }
  if (any) {
    moved_ = Clock::now();
  }
  return any;
}

bool Progress::start_waiting() {
  bool any = false;
  const std::vector<std::shared_ptr<Lane>> lanes = lanes_;
  for (const std::shared_ptr<Lane>& lane : lanes) {
    if (!lane->busy && !lane->waiting.empty()) {
      Operation next = std::move(lane->waiting.front());
      lane->waiting.pop_front();
      lane->busy = true;
      start(std::move(next), false);
      any = true;
    }
  }
  std::erase_if(lanes_, [](const auto& lane) { return !lane->busy && lane->waiting.empty(); });
  return any;
}

Progress::Pointer Progress::start(Operation operation, bool within_callback) {
  const auto flying = std::make_shared<Flying>();
  flying->deadline = Clock::now() + operation.timeout;
  flying->within_callback = within_callback;
  flying->operation = std::move(operation);
  const Lane& lane = *flying->operation.lane;
  flying_.push_back(flying);
  try {
    if (!lane.broken.empty()) {
      std::rethrow_exception(failure(lane.broken));
    }
    flying->requests = flying->operation.start();
  } catch (...) {
    finish(flying, std::current_exception(), {});
  }
  return flying;
}

bool Progress::test() {
  bool any = false;
  const std::vector<Pointer> flying = flying_;  // callbacks start and finish others
  for (const Pointer& one : flying) {
    if (one->ended) {
      continue;
    }
    Lane& lane = *one->operation.lane;
    Statuses statuses(one->requests.size());
    try {
      if (!all_done(one->requests, statuses, "a request failed")) {
        const bool late = Clock::now() > one->deadline;
        if (!late && !lane.aborted) {
          continue;
        }
        if (lane.broken.empty()) {
          lane.broken = late ? "mpi: an operation of this group timed out after " +
                                   std::to_string(one->operation.timeout.count()) + " ms"
                             : "mpi: this group was aborted";
        }
        abandoned_.push_back(one);
        finish(one, failure(lane.broken), {});
      } else {
        finish(one, nullptr, statuses);
      }
    } catch (const c10::Error&) {
      abandoned_.push_back(one);
      finish(one, std::current_exception(), {});
    }
    any = true;
  }
  if (any) {
    moved_ = Clock::now();
  }
  return any;
}

void Progress::finish(const Pointer& flying, std::exception_ptr error, const Statuses& statuses) {
  flying->ended = true;
  std::erase(flying_, flying);
  Operation& operation = flying->operation;
  if (!error && operation.finish) {
    try {
      const at::NoGradGuard no_grad;
      operation.finish(statuses);
    } catch (...) {
      error = std::current_exception();
    }
  }
  operation.work->end(std::move(error));  // runs callbacks
  if (operation.in_turn && !flying->within_callback) {
    operation.lane->busy = false;
  }
  operation.work.reset();
}

// A callback waits for what was given before: its own collective is done, so the next may start.
void Progress::drain() {
  const auto busy = [this] {
    return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return !lane->waiting.empty(); }) ||
           std::any_of(flying_.begin(), flying_.end(), [](const Pointer& one) { return one->operation.in_turn; });
  };
  take();
  while (busy()) {
    for (const auto& lane : lanes_) {
      lane->busy = std::any_of(flying_.begin(), flying_.end(), [&](const Pointer& one) {
        return one->operation.in_turn && one->operation.lane == lane;
      });
    }
    if (!step()) {
      pause();
    }
  }
}

}  // namespace ddp_lab::mpi
