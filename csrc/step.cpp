#include "step.h"

#include <cstring>
#include <map>
#include <memory>

namespace ringweave {

StepPlan::StepPlan(std::vector<Tree> trees, const std::vector<int32_t> &of_head, const std::vector<int64_t> &keys,
                   const Strided &view, int64_t tile)
    : tile(tile) {
  std::map<int64_t, int32_t> rows;  // the first row of the elements with so many keys
  for (const int64_t n : keys) {
    const auto [row, added] = rows.insert({n, (int32_t)row_ptr.size() / 2});
    if (added)
      for (Tree &tree : trees) {
        for (Leaf &leaf : tree.leaves) leaf.q = n - 1;
        add_row(tree, n, view);
      }
    for (const int32_t of : of_head) row_set.push_back(row->second + of);
    tiles = larger(tiles, (view.count(n) + tile - 1) / tile);
  }
}

void StepPlan::add_row(const Tree &tree, int64_t keys, const Strided &view) {
  row_ptr.push_back((int32_t)col.size());
  const std::unique_ptr<uint32_t[]> row(new uint32_t[(keys + 31) / 32]);
  paint_rows(tree.leaves, tree.text, 1, keys, row.get());
  const int64_t n = view.rate > 1 ? keep_every(row.get(), keys, view.first, view.rate) : keys;
  const int64_t words = (tile + 31) / 32, bytes = (n + 31) / 32 * 4;
  std::vector<uint8_t> states((n + tile - 1) / tile);
  states_of(row.get(), 1, n, tile, states.data());
  for (size_t t = 0; t < states.size(); ++t) {
    if (!states[t]) continue;
    const bool partial = states[t] == 2;
    col.push_back((int32_t)t), mask_id.push_back(partial ? (int32_t)(masks.size() / words) : -1);
    if (!partial) continue;
    // tiles are multiples of 16 keys
    const int64_t first = (int64_t)t * tile / 8;
    masks.resize(masks.size() + words);
    std::memcpy(&masks[masks.size() - words], (const char *)row.get() + first, (size_t)smaller(tile / 8, bytes - first));
  }
  row_ptr.push_back((int32_t)col.size());
}

Plan StepPlan::plan() const {
  Plan p;
  p.row_ptr = row_ptr.data(), p.col = col.data(), p.mask_id = mask_id.data(), p.row_set = row_set.data();
  p.mask_words = (const int32_t *)masks.data();
  p.q_tile = 1, p.kv_tile = (int)tile, p.words = (int)((tile + 31) / 32);
  p.q_tiles = 1, p.k_tiles = tiles, p.row_sets = (int64_t)row_ptr.size() / 2;
  p.masks = (int64_t)masks.size() / p.words, p.entries = (int64_t)col.size();
  return p;
}

}  // namespace ringweave
