// The plan of a decoding step: its row of tiles is painted from the pattern's zones in each call, for the numbers of keys
// that the call has, and of lists of keys with the keys that they name. Nothing about a length or a list is kept between
// calls.
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

// Keys, or blocks of `size` keys, that a model chose: (batch, heads, most); batch and heads may be 1, and -1 names no
// block. With `packs`, tiles are of the keys that are attended, one after the other; else they are tiles of all keys.
struct Lists {
  const int32_t *blocks = nullptr;
  int64_t batch = 0, heads = 0, most = 0, size = 1;
  bool packs = false;
};

// A plan with one query for each batch element, the last of its keys.
struct StepPlan {
  std::vector<int32_t> row_ptr, col, mask_id, row_set;
  std::vector<int32_t> chosen;  // the packed keys, see View::chosen
  std::vector<uint32_t> masks;

  // `keys` are the tokens of each batch element, and `of_head` has the tree of each head. Elements with as many keys
  // share rows.
  StepPlan(std::vector<Tree> trees, const std::vector<int32_t> &of_head, const std::vector<int64_t> &keys,
           const Strided &view, int64_t tile);
  // The relation filters lists, which are in range, of `keys` keys. A tile has a row for each head of a group.
  StepPlan(Tree tree, const Lists &lists, const Problem &call, int64_t keys, int64_t tile);

  // The plan over this memory.
  Plan plan() const;

 private:
  void add_row(const Tree &tree, int64_t keys, const Strided &view);
  void add_tiles(const uint32_t *row, int64_t keys);
  void add_packed(const uint32_t *row, int64_t keys);
  uint32_t *add_mask();

  const int64_t tile;
  const int group = 1;
  int64_t tiles = 0;
};

}  // namespace ringweave
