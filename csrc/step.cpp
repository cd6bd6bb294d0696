#include "step.h"

#include <algorithm>
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
  add_tiles(row.get(), view.rate > 1 ? keep_every(row.get(), keys, view.first, view.rate) : keys);
  row_ptr.push_back((int32_t)col.size());
}

StepPlan::StepPlan(Tree tree, const Lists &lists, const Problem &call, int64_t keys, int64_t tile)
    : tile(tile), group(call.group) {
  for (Leaf &leaf : tree.leaves) leaf.q = keys - 1;
  const int64_t words = (keys + 31) / 32, count = lists.batch * lists.heads;
  std::vector<uint32_t> allowed(words), row(words);
  paint_rows(tree.leaves, tree.text, 1, keys, allowed.data());
  for (int64_t l = 0; l < count; ++l) {
    std::fill(row.begin(), row.end(), 0);
    for (int64_t i = 0; i < lists.most; ++i) {
      const int64_t block = lists.blocks[l * lists.most + i], end = smaller((block + 1) * lists.size, keys);
      if (block < 0) continue;
      for (int64_t at = block * lists.size; at < end;) {
        const int64_t bit = at & 31, n = smaller(32 - bit, end - at);
        row[at >> 5] |= (uint32_t)(((uint64_t)1 << n) - 1) << bit, at += n;
      }
    }
    for (int64_t i = 0; i < words; ++i) row[i] &= allowed[i];
    row_ptr.push_back((int32_t)col.size());
    lists.packs ? add_packed(row.data(), keys) : add_tiles(row.data(), keys);
    row_ptr.push_back((int32_t)col.size());
  }
  if (lists.packs && chosen.empty()) chosen.assign(tile, 0);  // the kernel has keys, which no query attends
  tiles = ((lists.packs ? (int64_t)chosen.size() : keys) + tile - 1) / tile;
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.q_heads; ++h)
      row_set.push_back((int32_t)((lists.batch > 1 ? b : 0) * lists.heads + h * lists.heads / call.q_heads));
}

// Adds the tiles of a row of bits that are not empty.
void StepPlan::add_tiles(const uint32_t *row, int64_t keys) {
  const int64_t words = (tile + 31) / 32, bytes = (keys + 31) / 32 * 4;
  std::vector<uint8_t> states((keys + tile - 1) / tile);
  states_of(row, 1, keys, tile, states.data());
  for (size_t t = 0; t < states.size(); ++t) {
    if (!states[t]) continue;
    const bool partial = states[t] == 2;
    col.push_back((int32_t)t), mask_id.push_back(partial ? (int32_t)(masks.size() / (group * words)) : -1);
    if (!partial) continue;
    // tiles are multiples of 16 keys
    const int64_t first = (int64_t)t * tile / 8;
    uint32_t *mask = add_mask();
    std::memcpy(mask, (const char *)row + first, (size_t)smaller(tile / 8, bytes - first));
    for (int i = 1; i < group; ++i) std::memcpy(mask + i * words, mask, 4 * (size_t)words);
  }
}

// Adds tiles of the keys that a row of bits has, packed together.
void StepPlan::add_packed(const uint32_t *row, int64_t keys) {
  const size_t before = chosen.size();
  for (int64_t i = 0; i < (keys + 31) / 32; ++i)
    for (uint32_t bits = row[i]; bits; bits &= bits - 1) chosen.push_back((int32_t)(32 * i + __builtin_ctz(bits)));
  const auto count = (int64_t)(chosen.size() - before), rest = count % tile;
  chosen.resize(before + (count + tile - 1) / tile * tile, 0);
  while ((int64_t)col.size() * tile < (int64_t)chosen.size())
    col.push_back((int32_t)col.size()), mask_id.push_back(-1);
  if (!rest) return;
  const int64_t words = (tile + 31) / 32;
  mask_id.back() = (int32_t)(masks.size() / (group * words));
  uint32_t *mask = add_mask();
  for (int i = 0; i < group; ++i)
    for (int64_t at = 0; at < rest; ++at) mask[i * words + (at >> 5)] |= 1u << (at & 31);
}

// Returns zeros for another mask, a row for each head of a group.
uint32_t *StepPlan::add_mask() {
  const size_t words = (size_t)group * ((tile + 31) / 32);
  masks.resize(masks.size() + words);
  return &masks[masks.size() - words];
}

Plan StepPlan::plan() const {
  Plan p;
  p.row_ptr = row_ptr.data(), p.col = col.data(), p.mask_id = mask_id.data(), p.row_set = row_set.data();
  p.mask_words = (const int32_t *)masks.data();
  p.q_tile = group, p.kv_tile = (int)tile, p.words = (int)((tile + 31) / 32);
  p.q_tiles = 1, p.k_tiles = tiles, p.row_sets = (int64_t)row_ptr.size() / 2;
  p.masks = (int64_t)masks.size() / (group * p.words), p.entries = (int64_t)col.size();
  return p;
}

}  // namespace ringweave
