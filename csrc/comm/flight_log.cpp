#include "comm/flight_log.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

namespace ddp_lab {

namespace {

constexpr int kUsual = 2000;  // as torch's

std::int64_t wall_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Flight begin_flight(const char* title, const std::vector<at::Tensor>& inputs) {
  Flight flight;
  flight.title = title;
  for (const at::Tensor& input : inputs) {
    flight.shapes.push_back(input.sizes().vec());
    flight.dtypes.push_back(input.scalar_type());
  }
  flight.created_ns = wall_ns();
  flight.traceback = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/true, /*cpp=*/false);
  return flight;
}

FlightLog& FlightLog::of_process() {
  static auto* const kept = new FlightLog;  // other threads may outlive statics
  return *kept;
}

FlightLog::FlightLog()
    : capacity_(static_cast<std::size_t>(
          std::max(c10d::getCvarInt({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, kUsual), 0))) {}

std::uint64_t FlightLog::new_group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return groups_++;
}

std::uint64_t FlightLog::note(Flight flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t id = noted_++;
  flight.id = id;
  if (ring_.size() < capacity_) {
    ring_.push_back(std::move(flight));
  } else if (capacity_ != 0) {
    std::swap(ring_[id % capacity_], flight);
  }
  return id;
}

void FlightLog::reached(std::uint64_t id, Flight::State state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capacity_ != 0 && ring_[id % capacity_].id == id) {
    ring_[id % capacity_].state = state;
  }
}

std::vector<Flight> FlightLog::flights() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Flight> found = ring_;
  std::sort(found.begin(), found.end(), [](const Flight& a, const Flight& b) { return a.id < b.id; });
  return found;
}

}  // namespace ddp_lab
