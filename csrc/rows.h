// Rows of tensors: narrowing and widening, copies of a tile, and the transposition from rows to lanes and back.
#pragma once
#include "problem.h"
#include "vec.h"

namespace ringweave {
namespace {

RW_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
RW_INLINE float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

RW_INLINE float half_to_float(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
  float x = magnitude >= 0x0f800000u ? float_of(magnitude | 0x7f800000u) : float_of(magnitude) * 0x1p112f;
  return float_of(bits_of(x) | sign);
}

RW_INLINE uint16_t float_to_half(float x) {
  uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
  if (u < 0x38800000u)  // below 2^-14, the addition rounds to a multiple of 2^-24
    return (uint16_t)(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | ((u + 0xfff + ((u >> 13) & 1) - 0x38000000u) >> 13));
}

RW_INLINE uint16_t float_to_bfloat(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (uint16_t)((u & 0x7fffffff) > 0x7f800000u ? (u >> 16) | 0x40 : rounded);
}

// 1 sign bit, 4 exponent bits, 3 mantissa bits. The exponent bias is 8 less than that of a half; all bits set is NaN.
RW_INLINE float e4m3_to_float(uint8_t x) {
  const int magnitude = x & 0x7f;
  const uint32_t half = (uint32_t)(x & 0x80) << 8 | (magnitude == 0x7f ? 0x7e00 : (uint32_t)magnitude << 7);
  return half_to_float((uint16_t)half) * 256;
}

#if defined(RINGWEAVE_NEON)
// Loads W channels of bfloat16 or float16 and widens them.
RW_INLINE V load_half(const char *p, Dtype type) {
  const uint16x4_t x = vld1_u16((const uint16_t *)p);
  return type == BF16 ? (V)vshll_n_u16(x, 16) : (V)vcvt_f32_f16(vreinterpret_f16_u16(x));
}
#endif

// Widens n channels (a multiple of 8) to float32, without their scale.
inline void widen(float *to, const char *from, Dtype type, int n) {
  if (type == F32) {
    memcpy(to, from, 4 * (size_t)n);
    return;
  }
  if (type == I8 || type == E4M3) {
    for (int i = 0; i < n; ++i) to[i] = type == I8 ? (float)(int8_t)from[i] : e4m3_to_float((uint8_t)from[i]);
    return;
  }
#if defined(__AVX2__)
  for (int i = 0; i < n; i += 8) {
    __m128i x = _mm_loadu_si128((const __m128i *)(from + 2 * i));
    __m256 y = type == BF16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)) : _mm256_cvtph_ps(x);
    _mm256_storeu_ps(to + i, y);
  }
#elif defined(RINGWEAVE_NEON)
  for (int i = 0; i < n; i += W) store(to + i, load_half(from + 2 * i, type));
#else
  for (int i = 0; i < n; ++i) {
    uint16_t h;
    memcpy(&h, from + 2 * i, 2);
    to[i] = type == BF16 ? float_of((uint32_t)h << 16) : half_to_float(h);
  }
#endif
}

inline void narrow(char *to, const float *from, Dtype type, int n) {
  if (type == F32) {
    memcpy(to, from, 4 * (size_t)n);
    return;
  }
#if defined(__AVX2__)
  if (type == F16) {
    for (int i = 0; i < n; i += 8)
      _mm_storeu_si128((__m128i *)(to + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#elif defined(RINGWEAVE_NEON)
  if (type == F16) {
    for (int i = 0; i < n; i += W)
      vst1_u16((uint16_t *)(to + 2 * i), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)load(from + i))));
    return;
  }
#endif
  for (int i = 0; i < n; ++i) {
    uint16_t h = type == BF16 ? float_to_bfloat(from[i]) : float_to_half(from[i]);
    memcpy(to + 2 * i, &h, 2);
  }
}

RW_INLINE char *row_at(const View &v, int64_t b, int64_t h, int64_t n) {
  return v.data + b * v.batch + h * v.head + n * v.token;
}

// A tensor of queries, for the rows of one query tile.
RW_INLINE View of_tile(View v, int64_t tile) {
  v.data += tile * v.skip;
  return v;
}

// Transposes a 4x4 block of 4-byte elements.
RW_INLINE void turn4(const char *r0, const char *r1, const char *r2, const char *r3, char *to, ptrdiff_t ld) {
  I4 a = *(const I4U *)r0, b = *(const I4U *)r1, c = *(const I4U *)r2, d = *(const I4U *)r3;
  I4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  I4 AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  *(I4U *)to = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
  *(I4U *)(to + ld) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  *(I4U *)(to + 2 * ld) = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
  *(I4U *)(to + 3 * ld) = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
}

// Address of a token of keys or values, which may be paged.
RW_INLINE const char *token_at(const View &v, int64_t b, int64_t h, int64_t n) {
  if (v.chosen) n = v.chosen[n];
  if (!v.pages) return row_at(v, b, h, n);
  const Pages &p = *v.pages;
  return row_at(v, p.numbers[b * p.columns + (n >> p.shift)], h, n & ((1 << p.shift) - 1));
}
// Number of rows from `first` on, at most n, that are adjacent in memory: with pages, those in the same page.
RW_INLINE int run_of(const View &v, int64_t first, int n) {
  if (v.chosen) {
    int run = 1;
    while (run < n && v.chosen[first + run] == v.chosen[first] + run) ++run;
    n = run, first = v.chosen[first];
  }
  if (!v.pages) return n;
  const int64_t page = 1 << v.pages->shift;
  return (int)smaller(n, page - (first & (page - 1)));
}

// Loads the scales of n rows, or of the rows at n places, times `unit`; 0 for dead rows, and for rows up to a whole
// vector.
inline void row_scales(const View &t, int64_t b, int64_t h, int64_t first, int n, const uint8_t *dead, float unit,
                       float *to, const uint8_t *places = nullptr) {
  const View &scales = *t.scales;
  for (int r = 0; places && r < n; ++r) to[r] = load1(token_at(scales, b, h, first + places[r])) * unit;
  for (int r = places ? n : 0, end; r < n; r = end) {
    end = r + run_of(scales, first + r, n - r);
    const char *from = token_at(scales, b, h, first + r);
    if (scales.token == 4)  // a loop of vectors
      for (int i = r; i < end; ++i) to[i] = load1(from + 4 * (i - r)) * unit;
    else
      for (int i = r; i < end; ++i) to[i] = load1(from + (i - r) * scales.token) * unit;
  }
  for (int r = 0; dead && r < n; ++r)
    if (dead[r]) to[r] = 0;
  for (int r = n; r % W; ++r) to[r] = 0;
}

// Whether n floats are finite.
inline bool all_finite(const float *x, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] * 0.f;
  return sum == 0;
}

// Replaces those of n elements by 0 that are not finite.
inline void keep_finite(char *x, ptrdiff_t n, Single) {
  for (ptrdiff_t i = 0; i < n; ++i, x += 4)
    if (!(fabsf(load1(x)) < kInf)) memset(x, 0, 4);
}
#if defined(RW_PAIRS)
inline void keep_finite(char *x, ptrdiff_t n, Pair) {
  for (ptrdiff_t i = 0; i < 2 * n; ++i, x += 2)
    if ((x[1] & 0x7f) == 0x7f && (x[0] & 0x80)) memset(x, 0, 2);
}
#endif

// Places of the rows of a tile that are processed, ascending; the other rows are skipped.
struct Places {
  uint8_t row[kMostTile];
  int count = 0;
};

// Prefetches the rows of the next tile of two tensors while the current one is processed. Sparse lists jump in memory,
// which hardware prefetchers do not predict. If a tile has several pages, only the first one is prefetched.
struct Ahead {
  const char *x = nullptr, *y = nullptr;
  const Places *places = nullptr;  // null: all rows
  ptrdiff_t x_step = 0, y_step = 0;
  int x_bytes = 0, y_bytes = 0, rows = 0;
  Ahead() {}
  Ahead(const View &tx, const View &ty, int64_t b, int64_t h, int64_t first, int n, int x_width, int y_width)
      : x(token_at(tx, b, h, first)),
        y(token_at(ty, b, h, first)),
        x_step(tx.token),
        y_step(ty.token),
        x_bytes(x_width * bytes_of(tx.dtype)),
        y_bytes(y_width * bytes_of(ty.dtype)),
        rows(run_of(tx, first, n)) {}
  Ahead(const View &t, int64_t b, int64_t h, int64_t first, int n, int width) : Ahead(t, t, b, h, first, n, width, 0) {}
  // Prefetches only some rows of the tile.
  Ahead of(const Places *some) const {
    Ahead ahead = *this;
    ahead.places = some;
    if (some) ahead.rows = (int)smaller(rows, some->count);
    while (some && ahead.rows && some->row[ahead.rows - 1] >= rows) --ahead.rows;
    return ahead;
  }
  RW_INLINE void fetch(int from, int to) const {
    for (int i = from; i < to && i < rows; ++i) {
      const ptrdiff_t r = places ? places->row[i] : i;
      for (int i = 0; i < x_bytes; i += 64) __builtin_prefetch(x + r * x_step + i, 0, 2);
      for (int i = 0; i < y_bytes; i += 64) __builtin_prefetch(y + r * y_step + i, 0, 2);
    }
  }
};

// A tile as the broadcast side of a contraction: 4-byte elements, rows ld bytes apart.
struct Tile {
  const char *data;
  ptrdiff_t ld;
  // The whole tile, if this one begins at its row `row`.
  Tile from(int row) const { return {data - row * ld, ld}; }
};

// Whether the rows of y are the first channels of the rows of x, as the values of latent attention are of its keys.
inline bool begins_with(const View &x, int x_width, const View &y, int y_width) {
  const bool same = x.data == y.data && x.dtype == y.dtype && x.pages == y.pages;
  return same && x.batch == y.batch && x.head == y.head && x.token == y.token && y_width <= x_width;
}

// Which rows of a tile no query may attend; null if there are none. They are read as 0, so that a NaN does not spread.
typedef const uint8_t *Dead;

// A tile's rows for a contraction over channels, without their scales. With places, row i is the one at place i.
template <class Op>
inline Tile tile_rows(const View &t, int64_t b, int64_t h, int64_t first, int n, int width, Dead dead, char *memory,
                      const Places *places = nullptr) {
  const char *from = token_at(t, b, h, first);
  int run = run_of(t, first, n);
  const bool raw = Op::depth == 2 || t.dtype == F32;
  const ptrdiff_t size = (Op::depth == 2 ? 2 : 4) * (ptrdiff_t)width;
  // Contiguous rows are used in place, if nothing reads past the last one. Rows that are far apart are copied, since
  // they would compete for a few cache sets and TLB entries.
  if (raw && !dead && !places && t.token == size && run == n) return {from, size};
  for (int i = 0; i < n; ++i, from += t.token) {
    if (places)
      from = token_at(t, b, h, first + places->row[i]);
    else if (i == run)
      from = token_at(t, b, h, first + i), run += run_of(t, first + i, n - i);
    char *to = memory + i * size;
    if (dead && dead[i])
      memset(to, 0, (size_t)size);
    else if (raw)
      memcpy(to, from, (size_t)size);
    else
      widen((float *)to, from, t.dtype, width);
  }
  return {memory, size};
}

// Number of elements that tile_columns writes for n rows.
template <class Op>
inline ptrdiff_t column_elements(int n, int width, bool apart = false) {
  return (ptrdiff_t)width * (apart ? n : (n + Op::depth - 1) / Op::depth);
}

// A tile's rows for a contraction over rows. With pairs, rows 2i and 2i+1 are interleaved channel by channel; if
// `apart`, each row is interleaved with zeros. With places, row i is the one at place i.
template <class Op>
inline Tile tile_columns(const View &t, int64_t b, int64_t h, int64_t first, int n, int width, Dead dead,
                         char *memory, bool apart = false, const Places *places = nullptr) {
  if (Op::depth == 1) return tile_rows<Op>(t, b, h, first, n, width, dead, memory, places);
  const char *from = token_at(t, b, h, first);
  const int step = apart ? 1 : 2;
  // Even, if rows are paired: pages have 16 rows or more, and `first` is even. Chosen rows are found one by one.
  int run = t.chosen ? 0 : run_of(t, first, n);
  for (int i = 0; i < n; i += step, from += step * t.token) {
    const int64_t token = first + (places ? places->row[i] : i);
    if (places || t.chosen)
      from = token_at(t, b, h, token);
    else if (i == run)
      from = token_at(t, b, h, token), run += run_of(t, token, n - i);
    const bool low = !(dead && dead[i]), high = !apart && i + 1 < n && !(dead && dead[i + 1]);
    const char *next = from + t.token;
    if (high && places)
      next = token_at(t, b, h, first + places->row[i + 1]);
    else if (high && t.chosen)
      next = token_at(t, b, h, token + 1);
    char *to = memory + (ptrdiff_t)i * width * (4 / step);
    for (int c = 0; c < width; c += 8) {
      const H8 x = low ? *(const H8 *)(from + 2 * c) : H8{}, y = high ? *(const H8 *)(next + 2 * c) : H8{};
      *(H8 *)(to + 4 * c) = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
      *(H8 *)(to + 4 * c + 16) = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
    }
  }
  return {memory, 4 * (ptrdiff_t)width};
}

}  // namespace
}  // namespace ringweave
