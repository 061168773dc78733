// The c10d backend "mpi": collectives of CPU tensors through the MPI library of this machine.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace ddp_lab::mpi {

// Of the group of these ranks of MPI_COMM_WORLD, in this order; all of them make it.
c10::intrusive_ptr<c10d::Backend> make_backend(const std::vector<int>& ranks);

}  // namespace ddp_lab::mpi
