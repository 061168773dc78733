// The c10d backend "round_robin": each collective goes to the next of several groups of the same ranks, so that several
// of them are on their way at once. Its Python face is ddp_lab/comm/round_robin.py.
//
// See [Note: turns]. Which group a collective goes to follows from how many came before it, on every rank alike: ranks
// that enter the same collectives in the same order, as they have to on any group, meet in the same groups. Three kinds
// of call stay out of the turns:
// - Sending and receiving go to the first group. Two ranks send and receive without the others, so that the counts of
//   ranks would part; and what a rank sends with one tag has to be found by whoever receives it, from anyone even.
// - A barrier goes to all groups: it ends when all that was given to any of them before is done. It counts as one
//   collective.
// - What is coalesced between startCoalescing and endCoalescing goes to the first group, in one piece.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ddp_lab {

// `groups`: at least one; all of the same ranks.
c10::intrusive_ptr<c10d::Backend> make_round_robin(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups);

}  // namespace ddp_lab
