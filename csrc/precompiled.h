// What nearly every source includes of torch: parsed once, see [Note: a build of two minutes] in CMakeLists.txt.
// No source relies on it: each includes what it uses.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
