#include "mpi/calls.h"

#include <array>
#include <limits>
#include <string>

namespace ddp_lab::mpi {

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  const std::string said(text.data(), static_cast<std::size_t>(length));
  C10_THROW_ERROR(DistBackendError, "mpi: " + std::string(what) + ": " + said);
}

MPI_Datatype moved_as(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return MPI_UINT8_T;
    case 2:
      return MPI_UINT16_T;
    case 4:
      return MPI_UINT32_T;
    case 8:
      return MPI_UINT64_T;
    case 16:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      TORCH_CHECK_VALUE(false, "mpi can't move tensors of ", tensor.scalar_type());
  }
}

MPI_Datatype reduced_as(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kByte:
      return MPI_UINT8_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kShort:
      return MPI_INT16_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    default:
      TORCH_CHECK_VALUE(false, "mpi can't reduce tensors of ", tensor.scalar_type(),
                        ": convert them, to float32 say, or use another backend");
  }
}

MPI_Op operation_of(const c10d::ReduceOp& op, at::ScalarType dtype) {
  const bool integral = at::isIntegralType(dtype, true);
  switch (op) {
    case c10d::ReduceOp::SUM:
      return MPI_SUM;
    case c10d::ReduceOp::AVG:
      TORCH_CHECK_VALUE(!integral, "Cannot use ReduceOp.AVG with tensors of ", dtype, ", only with floating ones");
      return MPI_SUM;
    case c10d::ReduceOp::PRODUCT:
      return MPI_PROD;
    case c10d::ReduceOp::MIN:
      return MPI_MIN;
    case c10d::ReduceOp::MAX:
      return MPI_MAX;
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR:
      TORCH_CHECK_VALUE(integral, "Cannot use a bitwise ReduceOp with tensors of ", dtype, ", only with integers");
      return op == c10d::ReduceOp::BAND ? MPI_BAND : op == c10d::ReduceOp::BOR ? MPI_BOR : MPI_BXOR;
    default:
      TORCH_CHECK_VALUE(false,
                        "mpi does not support this reduction: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR");
  }
}

int count_of(std::int64_t elements, const char* what) {
  TORCH_CHECK_VALUE(elements <= std::numeric_limits<int>::max(), what, " of ", elements,
                    " elements: MPI counts in an int, up to ", std::numeric_limits<int>::max(),
                    "; use several smaller tensors");
  return static_cast<int>(elements);
}

}  // namespace ddp_lab::mpi
