#include "paint.h"

#include <algorithm>
#include <memory>

#include "problem.h"

namespace ringweave {
namespace {

constexpr int64_t kFewTiles = 64;  // are painted sooner than a thread starts

int64_t remainder(int64_t a, int64_t m) {
  const int64_t rest = a % m;
  return rest < 0 ? rest + m : rest;
}

// The bits of the first word of [lo, hi) from lo on, and of the last one up to hi.
uint32_t head_of(int64_t lo) { return ~0u << (lo & 31); }
uint32_t tail_of(int64_t hi) { return ~0u >> (31 - ((hi - 1) & 31)); }

// Sets the bits of [lo, hi) that next() has; it returns the bits of ascending words.
template <class Next>
void set_bits(uint32_t *row, int64_t lo, int64_t hi, Next next) {
  const int64_t first = lo >> 5, last = (hi - 1) >> 5;
  if (first == last) {
    row[first] |= next() & head_of(lo) & tail_of(hi);
    return;
  }
  row[first] |= next() & head_of(lo);
  for (int64_t i = first + 1; i < last; ++i) row[i] |= next();
  row[last] |= next() & tail_of(hi);
}

void set_all(uint32_t *row, int64_t lo, int64_t hi) {
  set_bits(row, lo, hi, [] { return ~0u; });
}

// Sets the bits of [lo, hi) that the residue keeps; a period begins at bit `from`.
void set_periodic(const Zones &z, uint32_t *row, int64_t lo, int64_t hi, int64_t from) {
  if (z.m <= kMostRepeated) {
    const int64_t step = 32 % z.m;
    int64_t place = remainder((lo & ~(int64_t)31) - from, z.m);
    set_bits(row, lo, hi, [&] {
      const uint32_t bits = (uint32_t)(z.repeated >> place);
      place += step;
      place -= place < z.m ? 0 : z.m;
      return bits;
    });
    return;
  }
  for (int64_t at = lo - remainder(lo - from, z.m); at < hi; at += z.m) {
    const int64_t a = larger(at, lo), b = smaller(at + z.width, hi);
    if (a < b) set_all(row, a, b);
  }
}

// Sets the bits of a tile's pairs, in rows of `words` words.
void paint_tile(const Zones &z, int64_t q_lo, int64_t q_hi, int64_t k_lo, int64_t k_hi, int64_t words, uint32_t *out) {
  const int64_t groups = (int64_t)z.q0.size();
  const bool listed = !z.ptr.empty();
  int64_t g = std::upper_bound(z.q1.begin(), z.q1.end(), q_lo) - z.q1.begin();
  for (; g < groups && z.q0[g] < q_hi; ++g) {
    const int64_t end = smaller(q_hi, z.q1[g]), stop = listed ? z.ptr[g + 1] : g + 1;
    int64_t q = larger(q_lo, z.q0[g]), run = listed ? z.ptr[g] : g;
    run = std::upper_bound(z.k1.begin() + run, z.k1.begin() + stop, larger(k_lo, q + z.d0[g])) - z.k1.begin();
    // whether the group's rows are equal: the band cuts none of the tile's keys
    const bool equal = z.axis != Zones::distance && end - 1 + z.d0[g] <= k_lo && q + z.d1[g] >= k_hi;
    const uint32_t *like = nullptr;
    for (; q < end; ++q) {
      if (z.axis == Zones::query && remainder(q - z.phase[g], z.m) >= z.width) continue;
      const int64_t lo = larger(k_lo, q + z.d0[g]), hi = smaller(k_hi, q + z.d1[g]);
      uint32_t *row = out + (q - q_lo) * words;
      if (like) {
        std::copy_n(like, words, row);
        continue;
      }
      if (equal) like = row;
      while (run < stop && z.k1[run] <= lo) ++run;  // the band ascends with the query
      for (int64_t r = run; r < stop && z.k0[r] < hi; ++r) {
        const int64_t a = larger(lo, z.k0[r]), b = smaller(hi, z.k1[r]);
        if (a >= b) continue;
        if (z.axis < Zones::key)
          set_all(row, a - k_lo, b - k_lo);
        else
          set_periodic(z, row, a - k_lo, b - k_lo, z.phase[g] + (z.axis == Zones::distance ? q : 0) - k_lo);
      }
    }
  }
}

}  // namespace

void paint(const Zones &zones, const Tiles &tiles, uint32_t *out, int threads) {
  const int64_t size = tiles.rows * tiles.words;
#pragma omp parallel for num_threads(threads) schedule(dynamic, kFewTiles) if (tiles.count > kFewTiles)
  for (int64_t i = 0; i < tiles.count; ++i) {
    std::fill_n(out + i * size, size, 0);
    paint_tile(zones, tiles.q_lo[i], tiles.q_hi[i], tiles.k_lo[i], tiles.k_hi[i], tiles.words, out + i * size);
  }
}

int64_t depth_of(const std::string &tree, size_t leaves) {
  int64_t rows = 0, most = 0;
  size_t used = 0;
  for (const char op : tree) {
    const bool leaf = op == '.', join = op == '&' || op == '|';
    if ((!leaf && !join && op != '~') || (!leaf && rows < (join ? 2 : 1))) return 0;
    used += leaf, rows += leaf ? 1 : join ? -1 : 0;
    most = larger(most, rows);
  }
  return rows == 1 && used == leaves ? most : 0;
}

void paint_rows(const std::vector<Leaf> &leaves, const std::string &tree, int64_t queries, int64_t keys, uint32_t *rows) {
  const int64_t words = (keys + 31) / 32, size = queries * words;
  if (!size) return;
  const std::unique_ptr<uint32_t[]> others(new uint32_t[(depth_of(tree, leaves.size()) - 1) * size]);
  auto at = [&](int64_t i) { return i ? others.get() + (i - 1) * size : rows; };
  const Leaf *leaf = leaves.data();
  int64_t painted = 0;
  for (size_t i = 0; i < tree.size(); ++i) {
    if (tree[i] == '.') {
      // the row of a leaf of a union is painted over the other; several rows may be copied from the first of them
      const bool over = queries == 1 && painted && i + 1 < tree.size() && tree[i + 1] == '|';
      uint32_t *mine = at(over ? painted - 1 : painted++);
      if (!over) std::fill_n(mine, size, 0);
      paint_tile(*leaf->zones, leaf->q, leaf->q + queries, leaf->k, leaf->k + keys, words, mine);
      ++leaf, i += over;
    } else if (tree[i] == '~') {
      uint32_t *mine = at(painted - 1);
      for (int64_t j = 0; j < size; ++j) mine[j] = ~mine[j];
    } else {
      uint32_t *mine = at(painted - 2), *other = at(--painted);
      if (tree[i] == '&')
        for (int64_t j = 0; j < size; ++j) mine[j] &= other[j];
      else
        for (int64_t j = 0; j < size; ++j) mine[j] |= other[j];
    }
  }
  for (int64_t q = 0; q < queries; ++q) rows[(q + 1) * words - 1] &= tail_of(keys);
}

int64_t keep_every(uint32_t *row, int64_t keys, int64_t first, int64_t rate) {
  int64_t kept = 0;
  uint32_t word = 0;
  // a word is written after all of its bits were read
  for (int64_t at = first; at < keys; at += rate, ++kept) {
    word |= (row[at >> 5] >> (at & 31) & 1) << (kept & 31);
    if ((kept & 31) == 31) row[kept >> 5] = word, word = 0;
  }
  if (kept & 31) row[kept >> 5] = word;
  return kept;
}

void states_of(const uint32_t *rows, int64_t queries, int64_t keys, int64_t tile, uint8_t *states) {
  const int64_t words = (keys + 31) / 32;
  for (int64_t lo = 0; lo < keys; lo += tile) {
    const int64_t hi = smaller(lo + tile, keys), first = lo >> 5, last = (hi - 1) >> 5;
    const uint32_t before = ~head_of(lo), after = ~tail_of(hi);
    uint32_t some = 0, every = ~0u;
    for (int64_t q = 0; q < queries; ++q) {
      const uint32_t *row = rows + q * words;
      for (int64_t j = first; j <= last; ++j) {
        const uint32_t outside = (j == first ? before : 0) | (j == last ? after : 0);
        some |= row[j] & ~outside, every &= row[j] | outside;
      }
    }
    *states++ = !some ? 0 : every == ~0u ? 1 : 2;
  }
}

}  // namespace ringweave
