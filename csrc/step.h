// The plan of a decoding step: its row of tiles is painted from the pattern's zones in each call, for the numbers of keys
// that the call has. Nothing about a length is kept between calls.
#pragma once
#include <string>
#include <vector>

#include "paint.h"
#include "problem.h"

namespace ringweave {

// The relation of some heads. The positions of its leaves are set for each row.
struct Tree {
  std::vector<Leaf> leaves;
  std::string text;  // see depth_of
};

// The keys of a step in a strided view: key n is token first + rate * n. In token order, `rate` is 1.
struct Strided {
  int64_t first = 0, rate = 1;
  int64_t count(int64_t keys) const { return keys > first ? (keys - first + rate - 1) / rate : 0; }
};

// A plan with one query for each batch element, the last of its keys.
struct StepPlan {
  std::vector<int32_t> row_ptr, col, mask_id, row_set;
  std::vector<uint32_t> masks;

  // `keys` are the tokens of each batch element, and `of_head` has the tree of each head. Elements with as many keys
  // share rows.
  StepPlan(std::vector<Tree> trees, const std::vector<int32_t> &of_head, const std::vector<int64_t> &keys,
           const Strided &view, int64_t tile);

  // The plan over this memory.
  Plan plan() const;

 private:
  void add_row(const Tree &tree, int64_t keys, const Strided &view);

  const int64_t tile;
  int64_t tiles = 0;
};

}  // namespace ringweave
