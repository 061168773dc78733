// What the reducer says when something is wrong: which parameters, which rank, what to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ddp_lab::messages {

// Where a backward stands; what every message names.
struct Where {
  std::int64_t step = 0;
  int rank = 0;
  std::string module;  // class and place of the user's module, or empty
};

// The last backward left `missing` (indices) of `names` without a gradient.
std::string unfinished(const Where& where, const std::vector<std::string>& names,
                       const std::vector<std::size_t>& missing, bool static_graph);

// A second gradient of parameter `index` in one backward. `unused`: it had been found to be unused.
std::string ready_twice(const Where& where, std::size_t index, const std::string& name, bool unused);

// A static graph brought a gradient more often than it did at first.
std::string graph_changed(const Where& where, const std::string& name);

// The gradient's type, layout or device is not what the bucket holds.
std::string unexpected_type(const std::string& name, const std::string& expected, const std::string& got);

// The backward before this one was ended by an exception, and no forward has discarded it.
std::string after_failure(const Where& where);

// A second backward of one forward, which ranks without inputs don't take part in.
std::string second_while_joined(const Where& where);

// The backward ran on after abandon().
std::string given_up(const Where& where);

// finalize_backward() without require_manual_backward_finalization; with nothing in flight; before `missing` (indices)
// of `names` have a gradient.
std::string not_manual();
std::string nothing_to_end(const Where& where);
std::string ended_early(const Where& where, const std::vector<std::string>& names,
                        const std::vector<std::size_t>& missing);

// Something begins before the last backward has got its finalize_backward().
std::string not_ended(const Where& where);

// torch.autograd.grad was asked for the gradient of a parameter.
std::string own_gradients(const std::string& name);

// Each forward walks the graph and finds nothing.
std::string needless_walk();

}  // namespace ddp_lab::messages
