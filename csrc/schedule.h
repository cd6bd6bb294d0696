// How a plan becomes pieces of work. Depends on the plan and the shapes only, never on the number of threads,
// so that a result is bitwise the same on any number of them. Which rows' lists are cut depends on all of the work, and
// changes no bits (see block_end).
#pragma once
#include <vector>

#include "problem.h"

namespace ringweave {

// Backward goes window by window, because dQ is summed in float32 and the sums of all query tiles would cost more than
// the gradients: a window is all query tiles of some units or, where those of one unit are too many, a range of them.
struct Window {
  int64_t first_piece, pieces, first_join, joins;
  int64_t first_sum;           // of all windows' sums, counted up
  int32_t unit, first, tiles;  // as Turns
};

struct Work {
  std::vector<Unit> units;
  std::vector<Piece> pieces;  // in the order in which they start
  std::vector<Join> joins;
  std::vector<Window> windows;       // of columns only
  std::vector<int32_t> rank, total;  // of columns only: as Turns
  int64_t tiles = 0;                 // of all pieces and heads
  int lanes = 0;                     // of the widest task
  int32_t slots = 0;                 // partial sums at a time
  int64_t sums = 0;                  // of dQ at a time
  int32_t kept = 0;                  // slots of Turns::kept
};

// Longest first: a short piece at the end leaves no thread waiting. Else in the order of the rows, to see what that costs.
Work row_work(const Problem &pb, bool longest = true);
// A piece waits for earlier ones only (see Turns), so the order of starting keeps it from waiting for ever.
Work column_work(const Problem &pb);

}  // namespace ringweave
