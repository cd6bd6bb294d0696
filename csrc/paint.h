// Paints zones as rows of bits: the masks of tiles, and the keys of one query. Bit c of a row is bit c % 32 of its word
// c / 32. There is no sum in it, so it is compiled once, not for each instruction set.
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

namespace ringweave {

// Positions, distances and phases have at most this size, so that sums of three fit in 64 bits.
constexpr int64_t kFarthest = (int64_t)1 << 61;

// Residues of up to this many numbers are painted word by word, and others period by period.
constexpr int64_t kMostRepeated = 32;

// Disjoint sets of pairs (query, key). Group g has the queries [q0[g], q1[g]), the keys of its runs, and of these pairs
// those with k - q in [d0[g], d1[g]). Its runs are [k0[r], k1[r]) for r from ptr[g] to ptr[g + 1], or r = g if `ptr` is
// empty. Groups ascend without overlap, and so do the runs of a group. A residue keeps the pairs of all groups with
// (x - phase[g]) mod m < width, where x is q, k or k - q.
struct Zones {
  std::vector<int64_t> q0, q1, ptr, k0, k1, d0, d1, phase;
  enum Axis { none = -1, query, key, distance } axis = none;
  int64_t m = 1, width = 1;
  uint64_t repeated = 0;  // bit i: whether i mod m < width; for m up to kMostRepeated
};

// Pairs of [q_lo[i], q_hi[i]) and [k_lo[i], k_hi[i]), each at most `rows` x 32 `words`.
struct Tiles {
  int64_t count, rows, words;
  const int64_t *q_lo, *q_hi, *k_lo, *k_hi;
};

// Bit c of row r of tile i of `out` (tiles, rows, words) becomes whether the zones have the pair (q_lo[i] + r,
// k_lo[i] + c); it is 0 outside of the tile.
void paint(const Zones &zones, const Tiles &tiles, uint32_t *out, int threads);

// Zones in a tree, with the positions of the first query and of the first key as these zones count them.
struct Leaf {
  const Zones *zones;
  int64_t q, k;
};

// A tree in postfix order is text: '.' the next leaf, '&' and, '|' or, '~' not. Returns the number of rows that exist
// together while it is painted, or 0 if it is no tree of this many leaves.
int64_t depth_of(const std::string &tree, size_t leaves);

// Paints the keys that consecutive queries attend as rows of bits, (queries, (keys + 31) / 32). The leaves have the
// positions of the first query. Bits from `keys` on are 0.
void paint_rows(const std::vector<Leaf> &leaves, const std::string &tree, int64_t queries, int64_t keys, uint32_t *rows);

// Keeps each `rate`th bit of a row of `keys` bits, from bit `first` on; returns the number of bits that it keeps.
int64_t keep_every(uint32_t *row, int64_t keys, int64_t first, int64_t rate);

// Finds the state of each tile of keys of some rows: 0 empty, 1 full, 2 partial.
void states_of(const uint32_t *rows, int64_t queries, int64_t keys, int64_t tile, uint8_t *states);

}  // namespace ringweave
