// How a plan becomes pieces of work. Depends on the plan and the shapes only, never on the number of threads,
// so that a result is bitwise the same on any number of them.
#pragma once
#include <vector>

#include "problem.h"

namespace ringweave {

struct Work {
  std::vector<Unit> units;
  std::vector<Piece> pieces;  // in the order in which they start
  std::vector<Join> joins;
  int lanes = 0;              // of the widest task
  int32_t slots = 0;          // partial sums
  std::vector<int64_t> windows;  // of columns: the pieces of `at_once` units begin here, the last window ends at the end
  int64_t at_once = 0;
};

// Longest first: a short piece at the end leaves no thread waiting.
Work row_work(const Problem &pb);
// A piece waits for earlier ones only (see Turns), so the order of starting keeps it from waiting for ever.
Work column_work(const Problem &pb);

// The sums of dQ: tiles of one unit, floats of one tile.
inline int64_t sum_tiles(const Problem &pb) { return pb.q_heads / pb.kv_heads * pb.plan.q_tiles; }
inline int64_t sum_floats(const Problem &pb) { return (int64_t)pb.plan.q_tile * pad_lanes(pb.d); }

struct Order {
  std::vector<int32_t> rank, total;  // of Turns
};
Order column_order(const Problem &pb);

}  // namespace ringweave
