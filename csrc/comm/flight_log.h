// The newest operations that our own backends were given, and how far each of them is: what torch's Flight Recorder is
// for its backends. That one can't be written to from outside of torch.
//
// Owner: `mutex_`.
#pragma once

#include <ATen/core/TensorBody.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ddp_lab {

struct Flight {
  enum class State : std::uint8_t { kScheduled, kStarted, kEnded };

  std::uint64_t id = 0;  // counts from 0 over all groups of the process
  std::string group;     // c10d's name
  std::uint64_t made = 0;
  std::uint64_t sequence = 0;
  const char* title = "";  // "shm:all_reduce"
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<at::ScalarType> dtypes;
  std::int64_t created_ns = 0;  // wall clock
  State state = State::kScheduled;
  std::shared_ptr<torch::CapturedTraceback> traceback;
};

// One that begins now, in the calling thread, whose Python frames it notes: takes the GIL, so hold no lock.
Flight begin_flight(const char* title, const std::vector<at::Tensor>& inputs);

class FlightLog {
 public:
  static FlightLog& of_process();

  // A number for a group object of this process.
  std::uint64_t new_group();

  // Returns the operation's id.
  std::uint64_t note(Flight flight);
  void reached(std::uint64_t id, Flight::State state);

  // In the order in which they were noted.
  std::vector<Flight> flights() const;

 private:
  FlightLog();

  mutable std::mutex mutex_;
  std::vector<Flight> ring_;
  std::size_t capacity_;
  std::uint64_t noted_ = 0;
  std::uint64_t groups_ = 0;
};

}  // namespace ddp_lab
