// A file that another process reads after this one has died: the newest events, and what they refer to.
#pragma once

#include <string_view>

namespace ddp_lab {

// [Note: what a dead rank leaves]
// A rank that is aborted, or killed, writes its journal no more: what it recorded in its last milliseconds would be
// lost, and just that says why. So `ddp-lab run` makes a file in memory for each rank, and the rank maps it in the
// place of the recorder's ring. An event costs what it cost before, and nothing is written when a rank dies: the pages
// belong to whoever holds the file, too. Descriptions are appended to the same file when they are made; those of calls
// and groups when C++ finds them, because Python asks for them only now and then.
//
// The file: a header, the recorder's slots, texts (JSON, each ended by a line feed). `ddp_lab/protocol/black_box.py`
// reads it. A forked child continues with a copy of its own, which nobody reads.

// From now on this process leaves what it records in this file, which becomes as large as needed. Once; no other thread
// may record at this moment. The file may be closed afterwards. Throws std::system_error.
void leave_in(int file);

// Leaves a text as well; without a file, or if there is no room for it, it does nothing. Any thread.
void leave(std::string_view text);

}  // namespace ddp_lab
