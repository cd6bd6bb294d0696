// Divides a plan into pieces of work. The division depends only on the plan and the shapes, never on the number of
// threads, so the bits of a result do not depend on that number either. Which rows' lists are split depends on the
// total work, but splitting changes no bits (see block_end).
#pragma once
#include <vector>

#include "problem.h"

namespace ringweave {

// Backward runs window by window: dQ is summed in float32, and the sums of all query tiles would need more memory than
// the gradients. A window has all query tiles of several units, or a range of one unit's query tiles if these are many.
struct Window {
  int64_t first_piece, pieces, first_join, joins;
  int64_t first_sum;           // number of sums in all earlier windows
  int32_t unit, first, tiles;  // as in Turns
};

struct Work {
  std::vector<Unit> units;
  std::vector<Piece> pieces;  // in the order in which they start
  std::vector<Join> joins;
  std::vector<Window> windows;       // only for columns
  std::vector<int32_t> rank, total;  // only for columns, as in Turns
  int64_t tiles = 0;                 // number of tiles in all pieces and heads
  int lanes = 0;                     // number of lanes of the widest task
  int32_t slots = 0;                 // number of partial sums that exist together
  int64_t sums = 0;                  // number of dQ sums that exist together
  int32_t kept = 0;                  // number of slots of Turns::kept
};

// Starts the longest pieces first, so that threads do not wait for a long piece at the end; or pieces in the order of
// their rows, to measure the difference.
Work row_work(const Problem &pb, bool longest = true);
// A piece waits only for pieces that start earlier (see Turns), so there is no deadlock.
Work column_work(const Problem &pb);

}  // namespace ringweave
