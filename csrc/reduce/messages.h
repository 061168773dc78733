// What the reducer says when something is wrong: which parameters, which rank, what to do.
#pragma once

#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
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

// How many parameters a message names.
inline constexpr std::size_t kMostNames = 20;

inline std::string on_rank(const Where& where) {
  const std::string module = where.module.empty() ? "" : " (" + where.module + ")";
  return "step " + std::to_string(where.step) + " on rank " + std::to_string(where.rank) + module;
}

inline std::string quoted(const std::string& name) { return "'" + name + "'"; }

// People search logs for the lines of the next two functions, so they are worded as torch words them.
inline std::string without_gradient(const Where& where, const std::vector<std::string>& names,
                                    const std::vector<std::size_t>& missing) {
  std::string indices, listed;
  for (std::size_t i = 0; i < std::min(missing.size(), kMostNames); ++i) {
    indices += (i ? " " : "") + std::to_string(missing[i]);
    listed += (i ? ", " : "") + names[missing[i]];
  }
  const std::string more =
      missing.size() > kMostNames ? " and " + std::to_string(missing.size() - kMostNames) + " more" : std::string();
  const std::string line = " which did not receive grad for rank " + std::to_string(where.rank) + ": ";
  return "\nParameter indices" + line + indices + more + "\nParameters" + line + listed + more;
}

inline std::string marked_twice(std::size_t index, const std::string& name) {
  return "\nParameter at index " + std::to_string(index) + " with name " + name +
         " has been marked as ready twice. This means that multiple autograd engine  hooks have fired for this "
         "particular parameter during this iteration.";
}

// The last backward left `missing` (indices) of `names` without a gradient.
inline std::string unfinished(const Where& where, const std::vector<std::string>& names,
                              const std::vector<std::size_t>& missing, bool static_graph) {
  std::string text =
      "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
      "that your ";
  if (static_graph) {
    text +=
        "training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then got "
        "unused in the second iteration. this is not compatible with static_graph set to True.";
  } else {
    text +=
        "module has parameters that were not used in producing loss: " + std::to_string(missing.size()) + " of " +
        std::to_string(names.size()) + " parameters got no gradient in " + on_rank(where) +
        ". Remove or freeze them, or have them found by passing the keyword argument `find_unused_parameters=True` to "
        "DistributedDataParallel; and let all `forward` function outputs participate in calculating loss.";
  }
  text += without_gradient(where, names, missing);
  text += "\nThat backward has been discarded, so the next forward starts clean.";
  if (!static_graph && c10d::debug_level() == c10d::DebugLevel::Off) {
    text +=
        " For more of what torch knows, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL; "
        "DETAIL also compares each collective between the ranks.";
  }
  return text;
}

// A second gradient of parameter `index` in one backward. `unused`: it had been found to be unused.
inline std::string ready_twice(const Where& where, std::size_t index, const std::string& name, bool unused) {
  std::string text = "Expected to mark a variable ready only once. ";
  if (unused) {
    return text + "The gradient of " + quoted(name) + " arrived in the backward of " + on_rank(where) +
           " although it can't be reached from the outputs of forward that were found, so that it counted as unused. "
           "Use the parameter inside forward, and return tensors that find_unused_parameters can find (in tuples, "
           "lists, dicts, dataclasses or objects with attributes)." +
           marked_twice(index, name);
  }
  return text + "The gradient of " + quoted(name) + " is ready a second time in the backward of " + on_rank(where) +
         ". Either backward was called several times over graphs that share it: add the losses up, or run all "
         "forwards but the last under no_sync(); or it is used by several reentrant backwards: pass "
         "use_reentrant=False to torch.utils.checkpoint.checkpoint, or static_graph=True if the graph never changes." +
         marked_twice(index, name);
}

// A static graph brought a gradient more often than it did at first.
inline std::string graph_changed(const Where& where, const std::string& name) {
  return "Your training graph has changed in this iteration, which static_graph=True rules out: " + quoted(name) +
         " got a gradient more often in the backward of " + on_rank(where) +
         " than in the first one (never, if it was unused then). Construct DistributedDataParallel with "
         "static_graph=False, and find_unused_parameters=True if some parameters are used only now and then.";
}

// The gradient's type, layout or device is not what the bucket holds.
inline std::string unexpected_type(const std::string& name, const std::string& expected, const std::string& got) {
  return "Expected " + expected + ", got " + got + " for the gradient of " + quoted(name);
}

// The backward continued after abandon().
inline std::string given_up(const Where& where) {
  return "the backward of step " + std::to_string(where.step) + " was abandoned (abandon_backward) on rank " +
         std::to_string(where.rank) + " while it ran: its gradients are not averaged";
}

// The backward before this one was ended by an exception, and no forward has discarded it.
inline std::string after_failure(const Where& where) {
  return "Expected to mark a variable ready only once. The backward of " + on_rank(where) +
         " was ended by an exception after some of its gradients had arrived, and this is another backward without a "
         "forward in between: its gradients can't be averaged, because the other ranks may still wait for those of "
         "the first one. Run forward again before the next backward, which discards the broken one, and call "
         "zero_grad() to remove its partial gradients.";
}

// A second backward of one forward, which ranks without inputs don't take part in.
inline std::string second_while_joined(const Where& where) {
  return "a second backward can't be synchronised inside join(): ranks that have run out of inputs take part in one "
         "backward for each forward, and this one, before " +
         on_rank(where) + ", is one more. Call backward() once, on the sum of the losses, or run it under no_sync().";
}

// finalize_backward() without require_manual_backward_finalization.
inline std::string not_manual() {
  return "finalize_backward() called but manual backward finalization is not required: a backward waits for its "
         "gradients itself. Set require_manual_backward_finalization = True before the forward to end it by hand.";
}

// finalize_backward() with nothing in flight.
inline std::string nothing_to_end(const Where& where) {
  return "finalize_backward() called but no gradient reduction requires finalization before " + on_rank(where) +
         ": call it once after each backward whose forward was outside no_sync().";
}

// finalize_backward() before `missing` (indices) of `names` have a gradient.
inline std::string ended_early(const Where& where, const std::vector<std::string>& names,
                               const std::vector<std::size_t>& missing) {
  return "finalize_backward() called before all DDP buckets were ready, in " + on_rank(where) +
         ". Call it when all gradients have arrived: after backward() if should_finalize_after_backward says so." +
         without_gradient(where, names, missing);
}

// Something begins before the last backward has got its finalize_backward().
inline std::string not_ended(const Where& where) {
  return "Expected to have finalized the prior backward pass before starting a new one: " + on_rank(where) +
         " waits for finalize_backward(), since require_manual_backward_finalization is True. Call it after "
         "backward(), before the next forward; it is still possible now.";
}

// torch.autograd.grad was asked for the gradient of a parameter.
inline std::string own_gradients(const std::string& name) {
  return "torch.autograd.grad was called for " + quoted(name) +
         " (and perhaps others) of a model in DistributedDataParallel: what it returns is this rank's own gradient, "
         "not the average over the ranks. Call backward() instead, or all_reduce the result; under no_sync() nothing "
         "is averaged and this warning does not come.";
}

// A gradient came from an accumulator that its parameter no longer has.
inline std::string old_accumulator(const Where& where, const std::string& name) {
  return "A gradient of " + quoted(name) + " arrived in " + on_rank(where) +
         " through a graph that was built before the parameter was converted (double(), half(), to(), cpu() ...), "
         "beside one that was built after it: it can't be averaged. Convert the model before the first forward of a "
         "backward.";
}

// A backward reached outputs of forward and brought no gradient.
inline std::string no_gradient(const Where& where) {
  return "The backward of " + on_rank(where) +
         " reached what forward returned, but no parameter of the model got a gradient, so nothing was averaged. "
         "Forward has computed with other tensors than the model's parameters: a copy of the module, "
         "torch.func.functional_call, or detached parameters.";
}

// Each forward walks the graph and finds nothing.
inline std::string needless_walk() {
  return "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
         "forward pass. Each forward searches the graph for them: leave the option out if all parameters are always "
         "used (not if a later forward may skip some).";
}

}  // namespace ddp_lab::messages
