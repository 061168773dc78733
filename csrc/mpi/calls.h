// What the MPI library knows in its own terms: error texts, element types, reductions.
#pragma once

// MPI's former C++ interface is not used: it needs a library of its own.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <ATen/ATen.h>
#include <mpi.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ddp_lab::mpi {

// Raises what the library says about `code`, unless it is success.
void check(int code, const char* what);

// For operations that move elements and don't look at them.
MPI_Datatype moved_as(const at::Tensor& tensor);
// For reductions; raises an error for what MPI has no type for.
MPI_Datatype reduced_as(const at::Tensor& tensor);
// AVG is a sum; who calls it divides.
MPI_Op operation_of(const c10d::ReduceOp& op, at::ScalarType dtype);

// As MPI counts elements, in an int.
int count_of(std::int64_t elements, const char* what);

}  // namespace ddp_lab::mpi
