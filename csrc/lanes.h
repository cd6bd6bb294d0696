// Lanes: the rows of a task, placed across vector lanes, in panels of a few vectors.
//
// A task's heads share the lanes: row r of head s is lane s * rows + r, and the number of lanes is padded to a multiple
// of 16. A matrix with `depth` rows over the lanes is stored panel by panel, each panel with depth x width floats, so
// that a kernel reads it sequentially.
#pragma once
#include "memory.h"
#include "rows.h"

namespace ringweave {
namespace {

constexpr int kWide = kRegisters == 32 ? 4 : 2;  // vectors in the widest panel

struct Lanes {
  int64_t batch, head, first;  // batch element, first head and first token in the tensor
  int heads, rows, count;      // count: number of lanes, padded
  int64_t tile = 0;            // of queries; 0 for keys
};

RW_INLINE int panel_width(int lane, int count) {
  int vectors = (count - lane) / W;
  return (vectors >= 4 && kWide >= 4 ? 4 : vectors >= 2 ? 2 : 1) * W;
}

RW_INLINE const char *lane_row(const View &t, const Lanes &lanes, int lane) {
  const int s = lane < lanes.rows ? 0 : lane / lanes.rows;  // avoids the slow division for the first head
  if (s >= lanes.heads) return nullptr;
  return row_at(t, lanes.batch, lanes.head + s, lanes.first + lane - s * lanes.rows) + lanes.tile * t.skip;
}

// Multiplies elements of Op by 0 or a power of two, of either sign. This is exact, so pairs need no rounding.
RW_INLINE V times(V x, V factor, Single) { return x * factor; }
#if defined(RW_PAIRS)
RW_INLINE V times(V x, V factor, Pair) {
  const V low = (V)((U)x << 16) * factor, high = (V)((U)x & 0xffff0000u) * factor;
  return (V)((U)low >> 16 | ((U)high & 0xffff0000u));
}
#endif

// Writes rows times a factor (see `times`) across lanes: to[channel][lane], elements of Op; padding lanes are 0. With
// places, which one head has, lane i is the row at place i.
template <class Op>
inline void pack(const View &t, const Lanes &lanes, int width, float factor, float *to, char *memory,
                 const Places *places = nullptr) {
  const auto row_of = [&](int lane) -> const char * {
    if (!places) return lane_row(t, lanes, lane);
    return lane < places->count ? row_at(t, lanes.batch, lanes.head, lanes.first + places->row[lane]) : nullptr;
  };
  const bool raw = Op::depth == 2 || t.dtype == F32;
  const int elements = width / Op::depth;
  for (int p = 0; p < lanes.count; p += panel_width(p, lanes.count)) {
    const int pw = panel_width(p, lanes.count);
    float *panel = to + (ptrdiff_t)p * elements;
    for (int g = 0; g < pw; g += W) {
      const char *r[W];
      for (int i = 0; i < W; ++i) {
        const char *from = row_of(p + g + i);
        char *copy = memory + (ptrdiff_t)i * width * 4;
        r[i] = from && raw ? from : copy;
        if (from && !raw)
          widen((float *)copy, from, t.dtype, width);
        else if (!from)
          memset(copy, 0, 4 * (size_t)width);
      }
      for (int c = 0; c < elements; c += 4) {
        V x[4];
        for (int i = 0; i < 4; ++i) x[i] = load_fourth(r + i, 4 * c);
        turn_fourths(x);
        for (int i = 0; i < 4; ++i) store(panel + (ptrdiff_t)(c + i) * pw + g, times(x[i], splat(factor), Op()));
      }
    }
  }
}

// Writes lanes back as rows, each lane multiplied by its factor. Returns whether a lane with a finite factor, which is
// not 0, has elements that are not finite.
inline bool unpack(const View &t, const Lanes &lanes, int width, const float *from, const float *factor, char *memory) {
  I broken = I{};
  for (int p = 0; p < lanes.count; p += panel_width(p, lanes.count)) {
    const int pw = panel_width(p, lanes.count);
    const float *panel = from + (ptrdiff_t)p * width;
    for (int g = 0; g < pw; g += W) {
      char *rows[W], *to[W];
      for (int i = 0; i < W; ++i) {
        rows[i] = const_cast<char *>(lane_row(t, lanes, p + g + i));
        to[i] = rows[i] && t.dtype == F32 ? rows[i] : memory + (ptrdiff_t)i * width * 4;
      }
      if (!rows[0]) break;
      const V f = load(factor + p + g);
      const V none = (V)(f == V{});
      V finite = V{};  // 0, or NaN
      for (int c = 0; c < width; c += 4) {
        V x[4];
        // A lane with factor 0 has no keys. Its result is 0 even if its sums are not finite.
        for (int i = 0; i < 4; ++i) x[i] = (V)((I)(load(panel + (ptrdiff_t)(c + i) * pw + g) * f) & ~(I)none);
        for (int i = 0; i < 4; ++i) finite = fused(x[i], V{}, finite);
        turn_fourths(x);
        for (int i = 0; i < 4; ++i) store_fourth(to + i, 4 * c, x[i]);
      }
      broken |= (I)(finite != finite) & (I)(f == f);
      for (int i = 0; i < W && rows[i] && t.dtype != F32; ++i) narrow(rows[i], (const float *)to[i], t.dtype, width);
    }
  }
  return any_below((V)(broken & (I)splat(-1)), 0);
}

// Reads one float per lane from a (batch, head, token) tensor.
inline void gather(const View &t, const Lanes &lanes, float padding, const PerLane<float> &to) {
  to.fill(lanes.count, [&](int i) {
    const char *from = lane_row(t, lanes, i);
    return from ? load1(from) : padding;
  });
}

// The mask of a tile: bit `lane` of row r, and which rows have no bit set.
struct TileMask {
  const uint32_t *rows = nullptr;  // null: all pairs are allowed
  int words = 0;
  const uint8_t *dead = nullptr;
  TileMask from(int row) const {
    return {rows ? rows + (ptrdiff_t)row * words : nullptr, words, dead ? dead + row : nullptr};
  }
};

// Adds the elements of row r of a tile that are not finite to the first n lanes of `sums` that the mask allows.
inline void add_broken(const float *row, int width, const TileMask &mask, int r, int n, int count, float *sums) {
  if (all_finite(row, width)) return;
  const uint32_t *bits = mask.rows ? mask.rows + (ptrdiff_t)r * mask.words : nullptr;
  for (int p = 0; p < n; p += panel_width(p, count)) {
    const int pw = panel_width(p, count);
    for (int lane = p; lane < smaller(n, p + pw); ++lane) {
      if (bits && !(bits[lane / 32] >> (lane % 32) & 1)) continue;
      float *to = sums + (ptrdiff_t)p * width + (lane - p);
      for (int c = 0; c < width; ++c)
        if (!(fabsf(row[c]) < kInf)) to[(ptrdiff_t)c * pw] += row[c];
    }
  }
}

// The range of a tile's rows that a mask allows for some lane: the first row, and one past the last.
struct Live {
  int first, last;
  int count() const { return last - first; }
};

// Trims empty rows at both ends of [r0, r0 + n), in whole steps of Op counted from an even row, and never takes a row
// before r0: in a view keys are not paired, so r0 may be odd, and the row before it was counted already.
template <class Op, class Empty>
RW_INLINE Live between(int r0, int n, Empty empty) {
  int first = r0, last = r0 + n;
  while (first < last && empty(first)) ++first;
  while (last > first && empty(last - 1)) --last;
  if (first == last) return {first, last};
  constexpr int below = Op::step - 1;
  return {(int)larger(first & ~below, r0), (int)smaller((last + below) & ~below, r0 + n)};
}

// The live rows for a panel's lanes.
template <class Op>
inline Live live_rows(const TileMask &mask, int r0, int n, int lane, int width) {
  if (!mask.rows) return {r0, r0 + n};
  const uint32_t *rows = mask.rows + lane / 32;
  const uint32_t bits = width < 32 ? ((1u << width) - 1) << (lane & 31) : ~0u;
  const int words = (width + 31) / 32;
  return between<Op>(r0, n, [&](int r) {
    uint32_t some = 0;
    for (int w = 0; w < words; ++w) some |= rows[(ptrdiff_t)r * mask.words + w];
    return (some & bits) == 0;
  });
}

// The live rows of a tile's n rows for all lanes. Moves `dead` to the first live row, or sets it to null if all rows in
// the range are live.
template <class Op>
inline Live live_rows(int n, Dead &dead) {
  if (!dead) return {0, n};
  const Live live = between<Op>(0, n, [&](int r) { return dead[r] != 0; });
  dead += live.first;
  if (!memchr(dead, 1, live.count())) dead = nullptr;
  return live;
}

// Finds the places of the first `rows` rows of a tile that any of n lanes attends, from a mask with a row per lane; with
// step 2, of whole pairs of rows.
inline void find_places(const uint32_t *mask, int n, int words, int rows, int step, Places &to) {
  uint32_t some[kMostTile / 32] = {};
  constexpr int all = kMostTile / 32;
  int i = 0;
  if (all % words == 0)  // a loop of vectors
    for (; i + all <= n * words; i += all)
      for (int w = 0; w < all; ++w) some[w] |= mask[i + w];
  for (int w = words; i && w < all; ++w) some[w % words] |= some[w];
  for (; i < n * words; ++i) some[i % words] |= mask[i];
  to.count = 0;
  for (int w = 0; w < words; ++w) {
    if (step == 2) some[w] |= (some[w] & 0x55555555u) << 1 | (some[w] >> 1 & 0x55555555u);
    for (uint32_t left = some[w]; left; left &= left - 1) {
      const int row = 32 * w + __builtin_ctz(left);
      if (row < rows) to.row[to.count++] = (uint8_t)row;
    }
  }
}

// Moves the elements at the places to the front, `width` elements for each row.
template <class T>
inline void move_to_front(T *rows, const Places &places, int width) {
  for (int i = 0; i < places.count; ++i)
    for (int j = 0; j < width; ++j) rows[(ptrdiff_t)i * width + j] = rows[(ptrdiff_t)places.row[i] * width + j];
}

// Keeps the bits at the places of n rows of a mask: bit i of a row is the one at place i. Returns the words of a row.
inline int keep_bits(const uint32_t *mask, int n, int words, const Places &places, uint32_t *to) {
  const int kept = (pad_lanes(places.count) + 31) / 32;
  for (int r = 0; r < n; ++r, mask += words)
    for (int w = 0; w < kept; ++w) {
      uint32_t bits = 0;
      const int last = (int)smaller(32, places.count - 32 * w);
      for (int i = 0; i < last; ++i) {
        const int place = places.row[32 * w + i];
        bits |= (mask[place >> 5] >> (place & 31) & 1) << i;
      }
      *to++ = bits;
    }
  return kept;
}

// Whether computing two halves of a panel, each with its own live rows, is faster than the whole panel. A half takes
// more time per pair.
inline bool apart(Live whole, Live low, Live high) { return 9 * (low.count() + high.count()) < 16 * whole.count(); }

// Marks which of n rows of `words` words are empty; returns null if none is.
inline Dead find_dead(const uint32_t *rows, int n, int words, uint8_t *dead) {
  bool any = false;
  for (int r = 0; r < n; ++r) {
    uint32_t or_all = 0;
    for (int w = 0; w < words; ++w) or_all |= rows[(ptrdiff_t)r * words + w];
    dead[r] = or_all == 0;
    any |= dead[r];
  }
  return any ? dead : nullptr;
}

// The lower or the upper lanes of two vectors, in turn.
RW_INLINE U zip(U x, U y, int upper) {
#if defined(__AVX512F__)
  return upper ? __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
               : __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return upper ? __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15)
               : __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return upper ? __builtin_shufflevector(x, y, 2, 6, 3, 7) : __builtin_shufflevector(x, y, 0, 4, 1, 5);
#endif
}

// Transposes a 32x32 block of bits in place (Hacker's Delight, 7-3, mirrored for least-bit-first words). Each step swaps
// bits of rows i and 16 + i, and then makes them rows 2i and 2i + 1, so that all steps work on whole vectors.
inline void turn_bits(uint32_t *a) {
  constexpr int half = 16 / W;
  static_assert(half * W == 16, "a vector has 4, 8 or 16 lanes");
  constexpr uint32_t masks[] = {0x0000ffff, 0x00ff00ff, 0x0f0f0f0f, 0x33333333, 0x55555555};
  U x[2 * half], y[2 * half];
  memcpy(x, a, sizeof x);
#pragma GCC unroll 5
  for (int step = 0; step < 5; ++step) {
    const int shift = 16 >> step;
#pragma GCC unroll 4
    for (int i = 0; i < half; ++i) {
      const U t = ((x[i] >> shift) ^ x[half + i]) & masks[step];
      const U low = x[i] ^ t << shift, high = x[half + i] ^ t;
      y[2 * i] = zip(low, high, 0), y[2 * i + 1] = zip(low, high, 1);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * half; ++i) x[i] = y[i];
  }
  memcpy(a, x, sizeof x);
}

// Transposes a mask with a row per query to one with a row per key and queries as lanes, repeated for each head of the
// task.
inline TileMask turn_mask(const uint32_t *mask, int mask_words, const Lanes &lanes, int keys, uint32_t *to,
                          uint8_t *dead) {
  const int words = (lanes.count + 31) / 32, one = (lanes.rows + 31) / 32;
  memset(to, 0, 4 * (size_t)words * keys);
  for (int k0 = 0; k0 < keys; k0 += 32)
    for (int w = 0; w < one; ++w) {
      uint32_t block[32], any = 0;
      for (int i = 0; i < 32; ++i) {
        int r = 32 * w + i;
        any |= block[i] = r < lanes.rows ? mask[(ptrdiff_t)r * mask_words + k0 / 32] : 0;
      }
      if (!any) continue;
      turn_bits(block);
      for (int i = 0; i < 32 && k0 + i < keys; ++i) {
        uint32_t *row = to + (ptrdiff_t)(k0 + i) * words;
        for (int s = 0; s < lanes.heads; ++s) {
          int bit = s * lanes.rows + 32 * w;
          row[bit >> 5] |= block[i] << (bit & 31);
          if ((bit & 31) && (block[i] >> (32 - (bit & 31)))) row[(bit >> 5) + 1] |= block[i] >> (32 - (bit & 31));
        }
      }
    }
  return {to, words, find_dead(to, keys, words, dead)};
}

}  // namespace
}  // namespace ringweave
