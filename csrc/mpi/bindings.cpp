// `ddp_lab._mpi`, an extension of its own, because an installation without MPI has none; see ddp_lab/comm/mpi.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "mpi/backend.h"
#include "mpi/progress.h"

namespace py = pybind11;

namespace ddp_lab::mpi {

namespace {

std::pair<int, int> begin() {
  Progress& progress = Progress::of_process();
  progress.begin();
  return {progress.rank(), progress.size()};
}

std::string tell_all(std::string text) {
  Progress& progress = Progress::of_process();
  progress.begin();
  progress.call([&text] {
    int size = count_of(static_cast<std::int64_t>(text.size()), "mpi: MPI_Bcast");
    check(MPI_Bcast(&size, 1, MPI_INT, 0, MPI_COMM_WORLD), "MPI_Bcast");
    text.resize(static_cast<std::size_t>(size));
    check(MPI_Bcast(text.data(), size, MPI_CHAR, 0, MPI_COMM_WORLD), "MPI_Bcast");
  });
  return text;
}

}  // namespace

}  // namespace ddp_lab::mpi

PYBIND11_MODULE(_mpi, module) {
  using namespace ddp_lab::mpi;
  const py::call_guard<py::gil_scoped_release> released;
  module.doc() = "torch.distributed's operations through MPI.";
  module.def("begin", &begin, "Begins MPI unless it has begun; this process's rank and the number of processes.",
             released);
  module.def(
      "end",
      [](double seconds) {
        return Progress::of_process().end(std::chrono::milliseconds(std::int64_t(1000 * seconds)));
      },
      "Ends MPI if it was begun here; False: something was still on its way after so long, and MPI goes on.",
      py::arg("seconds"), released);
  module.def("backend", &make_backend, "The c10d backend of a group of these ranks; all of them call it.",
             py::arg("ranks"), released);
  module.def("tell_all", &tell_all, "What rank 0 gives, on all ranks; all of them call it.", py::arg("text"), released);
}
