// Forward for a task of a few query rows, such as a decoding step, which is bound by reading K and V. For scores, the
// lanes are keys, and K is transposed in registers; for sums of values, the lanes are channels. Each number is the sum
// of the same products in the same order as in forward.h, so a row has the same bits.
#pragma once
#include "forward.h"

namespace ringweave {
namespace {

// Number of vectors of channels that are summed together for n queries, so that the sums fit the registers (measured).
constexpr int vectors_of(int n) { return kRegisters == 16 && n == 4 ? 2 : 4; }

typedef float F4 __attribute__((vector_size(16)));

RW_INLINE float max_lanes(V v) {
  float top = v[0];
  for (int i = 1; i < W; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

// Transposes a square of 4-byte elements.
RW_INLINE void turn(V (&x)[W]) {
#if defined(__AVX2__)
  V y[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
#if defined(__AVX512F__)
    y[i] = (V)_mm512_unpacklo_ps((__m512)x[i], (__m512)x[i + 1]);
    y[i + 1] = (V)_mm512_unpackhi_ps((__m512)x[i], (__m512)x[i + 1]);
#else
    y[i] = (V)_mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
    y[i + 1] = (V)_mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
#endif
  }
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 4)  // x[i + k] then has columns k, k + 4, ... of four rows
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
#if defined(__AVX512F__)
      x[i + 2 * k] = (V)_mm512_unpacklo_pd((__m512d)y[i + k], (__m512d)y[i + 2 + k]);
      x[i + 2 * k + 1] = (V)_mm512_unpackhi_pd((__m512d)y[i + k], (__m512d)y[i + 2 + k]);
#else
      x[i + 2 * k] = (V)_mm256_unpacklo_pd((__m256d)y[i + k], (__m256d)y[i + 2 + k]);
      x[i + 2 * k + 1] = (V)_mm256_unpackhi_pd((__m256d)y[i + k], (__m256d)y[i + 2 + k]);
#endif
    }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
#if defined(__AVX512F__)
    const __m512 even = _mm512_shuffle_f32x4((__m512)x[k], (__m512)x[4 + k], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4((__m512)x[k], (__m512)x[4 + k], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4((__m512)x[8 + k], (__m512)x[12 + k], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4((__m512)x[8 + k], (__m512)x[12 + k], 0xdd);
    x[k] = (V)_mm512_shuffle_f32x4(even, even2, 0x88), x[8 + k] = (V)_mm512_shuffle_f32x4(even, even2, 0xdd);
    x[4 + k] = (V)_mm512_shuffle_f32x4(odd, odd2, 0x88), x[12 + k] = (V)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
#else
    const __m256 low = (__m256)x[k], high = (__m256)x[4 + k];
    x[k] = (V)_mm256_permute2f128_ps(low, high, 0x20), x[4 + k] = (V)_mm256_permute2f128_ps(low, high, 0x31);
#endif
  }
#else
  const V a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  const V c = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
#endif
}

// Loads W channels of a row that is stored as T, divided by unit<T>.
template <int T>
constexpr float unit = T == E4M3 ? 256.f : 1.f;
template <int T>
RW_INLINE V load_as(const char *row, int c) {
  if constexpr (T == F32) return load(row + 4 * c);
  const char *at = row + (T == I8 || T == E4M3 ? c : 2 * c);
#if defined(__AVX512F__)
  if constexpr (T == I8) return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
  if constexpr (T == E4M3) {  // see e4m3_to_float
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
    const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(0x3f80));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x3f80));
    const __m256i half = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16((short)0x8000)),
                                         _mm256_mask_mov_epi16(magnitude, nan, _mm256_set1_epi16(0x7e00)));
    return (V)_mm512_cvtph_ps(half);
  }
  const __m256i x = _mm256_loadu_si256((const __m256i *)at);
  return T == BF16 ? (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16) : (V)_mm512_cvtph_ps(x);
#elif defined(__AVX2__)
  if constexpr (T == I8) return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
  if constexpr (T == E4M3) {
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)at));
    const __m128i magnitude = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(0x3f80));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
    const __m128i half = _mm_or_si128(_mm_and_si128(_mm_slli_epi16(x, 8), _mm_set1_epi16((short)0x8000)),
                                      _mm_or_si128(magnitude, _mm_and_si128(nan, _mm_set1_epi16(0x7e00))));
    return (V)_mm256_cvtph_ps(half);
  }
  const __m128i x = _mm_loadu_si128((const __m128i *)at);
  return T == BF16 ? (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16) : (V)_mm256_cvtph_ps(x);
#elif defined(RINGWEAVE_NEON)
  if constexpr (T == I8 || T == E4M3) {
    uint32_t four;
    memcpy(&four, at, 4);
    const uint8x8_t x = vcreate_u8(four);
    if constexpr (T == I8) return (V)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x)))));
    const uint16x4_t wide = vget_low_u16(vmovl_u8(x)), nan = vdup_n_u16(0x3f80);
    const uint16x4_t magnitude = vand_u16(vshl_n_u16(wide, 7), nan), sign = vand_u16(vshl_n_u16(wide, 8), vdup_n_u16(0x8000));
    const uint16x4_t half = vorr_u16(sign, vbsl_u16(vceq_u16(magnitude, nan), vdup_n_u16(0x7e00), magnitude));
    return (V)vcvt_f32_f16(vreinterpret_f16_u16(half));
  }
  return load_half(at, (Dtype)T);
#else
  V v;
  for (int i = 0; i < W; ++i) {
    uint16_t h;
    if constexpr (T == I8) {
      v[i] = (float)(int8_t)at[i];
    } else if constexpr (T == E4M3) {
      v[i] = e4m3_to_float((uint8_t)at[i]) / unit<T>;
    } else {
      memcpy(&h, at + 2 * i, 2);
      v[i] = T == BF16 ? float_of((uint32_t)h << 16) : half_to_float(h);
    }
  }
  return v;
#endif
}

// Number of channels in a 4-byte word of a row of keys. F16 channels are widened to one word each when they are loaded.
template <int T>
constexpr int in_word = T == BF16 ? 2 : T == I8 || T == E4M3 ? 4 : 1;
template <int T>
constexpr int word_bytes = T == F16 ? 2 : 4;

// Channel i of a word, divided by unit<T>.
template <int T>
RW_INLINE V channel(V word, int i) {
  const U bits = (U)word;
  if constexpr (T == BF16) return i ? (V)(bits & 0xffff0000u) : (V)(bits << 16);
  if constexpr (T == I8) return __builtin_convertvector((I)(bits << (24 - 8 * i)) >> 24, V);
  if constexpr (T == E4M3) {  // the value as a half, which has an exponent of 5 bits
    const U byte = bits >> (8 * i), magnitude = byte & 0x7f;
    const V x = (V)(magnitude << 20) * splat(0x1p112f);
    return (V)((U)(magnitude == 0x7f ? x - x / V{} : x) | (byte & 0x80) << 24);
  }
  return word;
}

// Number of products per word of K: one for each channel, or a single product of the whole word with pairs.
template <class Op, int T>
constexpr int parts = Op::depth == 2 ? 1 : in_word<T>;

alignas(64) constexpr char kZeros[4 * kMostChannels] = {};

// Addresses of a panel's rows.
struct Rows {
  const char *row[kPanelRows];
  int n = 0;
  // After the last row, its address is repeated; the products there are not used.
  void set(const View &t, const Unit &u, int64_t first, int count) {
    n = count;
    for (int r = 0; !count && r < kPanelRows; ++r) row[r] = kZeros;
    for (int r = 0, end; r < count; r = end) {
      end = r + run_of(t, first + r, count - r);
      const char *from = token_at(t, u.batch, u.kv_head, first + r);
      for (int i = r; i < end; ++i) row[i] = from + (i - r) * t.token;
    }
    for (int r = count; count && r < kPanelRows; ++r) row[r] = row[count - 1];
  }
};

// Prefetches the rows that are needed next while others are processed, in memory order, which the hardware prefetcher
// also follows.
struct Fetch {
  const Rows *rows;
  int bytes;
  int row = 0, at = 0;
  RW_INLINE void lines(int n) {
    for (; n && row < rows->n; --n) {
      __builtin_prefetch(rows->row[row] + at, 0, 2);
      if ((at += 64) >= bytes) at = 0, ++row;
    }
  }
  // Prefetches the remaining lines.
  void rest() { lines(INT32_MAX); }
};

struct Few {
  // aligned, since vectors that cross cache lines make a step a tenth slower
  alignas(64) float s[kFew * kPanelRows], out[kFew * kMostChannels], total[kFew * kMostChannels];
  alignas(64) uint16_t pairs[kFew * kPanelRows];  // weights in bfloat16, in builds with pairs
  float top[kFew], sum[kFew], total_top[kFew], total_sum[kFew], shrink[kFew];
  int count, d, dv;  // dv: padded to whole vectors
};

// Loads W words of W keys and transposes them, so that lanes are keys. `words` beyond the end of the rows are 0.
template <int T>
RW_INLINE void load_words(const char *const *row, ptrdiff_t at, int words, V (&x)[W]) {
  constexpr int type = T == F16 ? F16 : F32;
  if (words >= W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) x[i] = load_as<type>(row[i] + at, 0);
  } else {
    for (int i = 0; i < W; ++i) {
      alignas(64) char end[4 * W] = {};
      memcpy(end, row[i] + at, (size_t)words * word_bytes<T>);
      x[i] = load_as<type>(end, 0);
    }
  }
  turn(x);
}

// Adds the products of one word of G vectors of keys with N queries.
template <class Op, int T, int N, int G>
RW_INLINE void add_word(const V (&word)[G], const float *q, int pw, Sum<Op> (&acc)[N][G]) {
#pragma GCC unroll 4
  for (int i = 0; i < parts<Op, T>; ++i, q += pw) {
    V x[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) x[g] = Op::depth == 2 ? word[g] : channel<T>(word[g], i);
#pragma GCC unroll 4
    for (int l = 0; l < N; ++l) {
      const V of_query = splat(q[l]);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) acc[l][g].add(x[g], of_query);
    }
  }
}

// The words of a panel's keys, transposed: W words from one channel on, each of all keys.
typedef float Turned[W][kPanelRows];

// Adds the products of G vectors of keys, from row r of a panel on, with N queries, for the first `words` words.
template <class Op, int T, int N, int G>
RW_INLINE void add_words(Few &f, const Turned &turned, int r, bool first, int words, const float *q, int pw) {
  Sum<Op> acc[N][G];
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[l][g].begin(first ? V{} : load(f.s + l * kPanelRows + r + g * W));
  for (int i = 0; i < words; ++i, q += (ptrdiff_t)parts<Op, T> * pw) {
    V word[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) word[g] = load(turned[i] + r + g * W);
    add_word<Op, T, N, G>(word, q, pw, acc);
  }
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) store(f.s + l * kPanelRows + r + g * W, acc[l][g].end());
}

// Computes the products of a panel of keys with N queries, each a sum over channels from first to last. All keys of a
// panel are transposed before the sums, and several vectors of keys are summed at once: independent chains hide the
// latency of additions.
template <class Op, int T, int N>
RW_INLINE void products(Few &f, const Rows &k, const float *q, int pw, Fetch &ahead) {
  constexpr int G = (int)smaller(kPanelRows / W, 8 / N);
  alignas(64) Turned turned;
  const int all = f.d / in_word<T>;
  for (int w0 = 0; w0 < all; w0 += W, q += (ptrdiff_t)W * parts<Op, T> * pw) {
    const int words = (int)smaller(W, all - w0);
    for (int r = 0; r < k.n; r += W) {
      V x[W];
      load_words<T>(k.row + r, (ptrdiff_t)w0 * word_bytes<T>, words, x);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(turned[i] + r, x[i]);
    }
    // spread evenly: as many lines as the words have
    constexpr int lines = (W * W * word_bytes<T> + 63) / 64;
    int r = 0;
    for (; r + (G - 1) * W < k.n; r += G * W) {
      add_words<Op, T, N, G>(f, turned, r, w0 == 0, words, q, pw);
      ahead.lines(G * lines);
    }
    for (; r < k.n; r += W) {
      add_words<Op, T, N, 1>(f, turned, r, w0 == 0, words, q, pw);
      ahead.lines(lines);
    }
  }
  ahead.rest();
}
template <class Op, int T>
__attribute__((noinline)) void few_products(Few &f, const Rows &k, const float *q, int pw, Fetch &ahead) {
  if (f.count > 2)
    products<Op, T, 4>(f, k, q, pw, ahead);
  else if (f.count == 2)
    products<Op, T, 2>(f, k, q, pw, ahead);
  else
    products<Op, T, 1>(f, k, q, pw, ahead);
}

// Converts a panel's products to scores, if there are no terms: multiplies by the keys' scales and masks.
template <bool Scored>
inline void few_scores(const Problem &pb, Few &f, int keys, const TileMask &mask, const float *scales) {
  const Scale scale(pb);
  const V before = splat(scale.before);
  for (int l = 0; l < f.count; ++l) {
    float *s = f.s + l * kPanelRows;
    for (int r = keys; r % W; ++r) s[r] = 0;
    V least = splat(kInf);
    for (int r = 0; r < keys; r += W) {
      V x = load(s + r);
      if (scales) x *= load(scales + r);
      if (Scored) x *= before;
      least = min(x, least);
      store(s + r, x);
    }
    if (!mask.rows) {
      if (any_below(least, -scale.most)) mark_below(pb);
      continue;
    }
    for (int r = 0; r < keys; ++r)
      if (!(mask.rows[(ptrdiff_t)r * mask.words] >> l & 1))
        s[r] = -kInf;
      else if (s[r] < -scale.most)
        mark_below(pb);
  }
}

// Applies the terms to the scores of a tile's keys from k0 on, and masks.
inline void few_terms(Pairs &pairs, Few &f, const Lanes &lanes, int k0, int keys, const TileMask &mask) {
  for (int l = 0; l < f.count; ++l) {
    float *s = f.s + l * kPanelRows;
    pairs.head = lanes.head + l / lanes.rows;
    pairs.set_rows(lanes.first + l % lanes.rows, 1);
    pairs.apply(s, 0, 1, k0, (keys + W - 1) / W * W);
    for (int r = 0; mask.rows && r < keys; ++r)
      if (!(mask.rows[(ptrdiff_t)r * mask.words] >> l & 1)) s[r] = -kInf;
  }
}

// The sums of the rows of weights, from first to last key in the order in which `exponentials` adds them.
template <class Op>
RW_INLINE F4 sum_keys(const float *p, int keys) {
  F4 sum = {};
  for (int r = 0; r < keys; r += 4) {
    const F4 a = (F4)*(const I4U *)(p + r), b = (F4)*(const I4U *)(p + kPanelRows + r);
    const F4 c = (F4)*(const I4U *)(p + 2 * kPanelRows + r), d = (F4)*(const I4U *)(p + 3 * kPanelRows + r);
    const F4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const F4 AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const F4 k0 = __builtin_shufflevector(ab, cd, 0, 1, 4, 5), k1 = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    const F4 k2 = __builtin_shufflevector(AB, CD, 0, 1, 4, 5), k3 = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
    if (Op::depth == 2) {
      sum += k0 + k1;
      sum += k2 + k3;
    } else {
      sum += k0;
      sum += k1;
      sum += k2;
      sum += k3;
    }
  }
  return sum;
}

// Places each key of a panel of at most half the rows in a pair with a key that is not attended (see Spacing).
inline void few_apart(Few &f, Rows &v, int n) {
  for (int r = n - 1; r >= 0; --r) {
    v.row[2 * r] = v.row[r], v.row[2 * r + 1] = kZeros;
    for (int l = 0; l < f.count; ++l) {
      float *s = f.s + l * kPanelRows;
      s[2 * r] = s[r], s[2 * r + 1] = -kInf;
    }
  }
  v.n = 2 * n;
}

// Replaces a panel's scores by weights in place, and updates maxima, sums and the factors by which earlier sums shrink.
template <class Op>
inline void few_softmax(Few &f, int keys, float c) {
  for (int l = 0; l < f.count; ++l) {
    float *s = f.s + l * kPanelRows;
    for (int r = keys; r % W; ++r) s[r] = -kInf;
    V tops = splat(-kInf);
    for (int r = 0; r < keys; r += W) tops = max(load(s + r), tops);
    float top = max_lanes(tops);
    if (!(top > f.top[l])) top = f.top[l];
    const V low = no_inf(splat(top));
    f.shrink[l] = exp2((splat(f.top[l]) - low) * splat(c))[0];
    f.top[l] = top;
    for (int r = 0; r < keys; r += W) store(s + r, exp2((load(s + r) - low) * splat(c)));
  }
  const F4 sum = sum_keys<Op>(f.s, keys);
  for (int l = 0; l < f.count; ++l) f.sum[l] = f.sum[l] * f.shrink[l] + sum[l];
}

#if defined(RW_PAIRS)
// Interleaves the channels of two rows of bfloat16 to pairs, for one half of the channels or the other.
RW_INLINE V beside(V a, V b, int half) {
#if defined(__AVX512BF16__)
  return (V)(half ? _mm512_unpackhi_epi16((__m512i)a, (__m512i)b) : _mm512_unpacklo_epi16((__m512i)a, (__m512i)b));
#else
  const uint16x8_t x = (uint16x8_t)a, y = (uint16x8_t)b;
  return (V)(half ? vzip2q_u16(x, y) : vzip1q_u16(x, y));
#endif
}
#endif
// Index of a channel after `beside`, which halves 128 bits at a time.
RW_INLINE int besides(int c) { return c / (2 * W) * 2 * W + c / 4 % 2 * W + c % (2 * W) / 8 * 4 + c % 4; }

// Adds a panel's weighted values to the sums of N queries, from channel c on: C vectors of channels, or of row pairs.
template <class Op, int T, int N, int C>
RW_INLINE void add_rows(const Few &f, const char *const *row, ptrdiff_t at, int n, int c, float *out, Fetch &ahead) {
  constexpr int M = Op::depth * C, bytes = C * bytes_of((Dtype)T) * Op::depth * W;  // bytes of a row
  Sum<Op> acc[N][M];
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) acc[l][j].begin(V{});
  for (int r = 0; r < n; r += Op::depth) {
    V x[M];
    if (is_tiled<Op> && r && r % Op::step == 0) {
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
        for (int j = 0; j < M; ++j) acc[l][j].fold();
    }
#if defined(RW_PAIRS)
    if constexpr (Op::depth == 2) {
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) {
        const V a = load(row[r] + at + 4 * W * j), b = load(row[r + 1] + at + 4 * W * j);
        x[2 * j] = beside(a, b, 0), x[2 * j + 1] = beside(a, b, 1);
      }
    }
#endif
    if constexpr (Op::depth == 1) {
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) x[j] = load_as<T>(row[r] + at, j * W);
    }
#pragma GCC unroll 4
    for (int l = 0; l < N; ++l) {
      const char *p = Op::depth == 2 ? (const char *)(f.pairs + l * kPanelRows + r)
                                     : (const char *)(f.s + l * kPanelRows + r);
      const V weight = splat_at(p);
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j) acc[l][j].add(x[j], weight);
    }
    // as many lines as four rows have, since a call takes longer than a row
    if (r % 4 == 0) ahead.lines((4 * bytes + 63) / 64);
  }
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) {
      float *to = out + l * kMostChannels + c + j * W;
      store(to, load(to) * splat(f.shrink[l]) + acc[l][j].end());
    }
}

template <class Op, int T, int N>
RW_INLINE void add_rows(Few &f, const Rows &v, int dv, Fetch &ahead) {
  constexpr int channels = Op::depth * W, size = bytes_of((Dtype)T);
  constexpr int most = is_tiled<Op> ? 1 : vectors_of(N) / Op::depth;  // fewer for tiled sums, which have three parts
  int c = 0;
  const auto blocks = [&](auto vectors) __attribute__((always_inline)) {
    constexpr int C = decltype(vectors)::value;
    if constexpr (C <= most)
      for (; c + C * channels <= dv; c += C * channels)
        add_rows<Op, T, N, C>(f, v.row, (ptrdiff_t)c * size, v.n, c, f.out, ahead);
  };
  blocks(Int<4>()), blocks(Int<2>()), blocks(Int<1>());
  if (c == dv) return;
  alignas(64) char ends[kPanelRows * 64] = {};  // the ends of the rows, padded with zeros
  const char *row[kPanelRows];
  for (int r = 0; r < kPanelRows; ++r) row[r] = ends + r * 64;
  for (int r = 0; r < v.n; ++r) memcpy(ends + r * 64, v.row[r] + (ptrdiff_t)c * size, (size_t)(dv - c) * size);
  add_rows<Op, T, N, 1>(f, row, 0, v.n, c, f.out, ahead);
}

// Adds a panel's weighted values for all queries.
template <class Op, int T>
__attribute__((noinline)) void few_values(Few &f, const Rows &v, Fetch &ahead) {
  if (f.count > 2)
    add_rows<Op, T, 4>(f, v, f.dv, ahead);
  else if (f.count == 2)
    add_rows<Op, T, 2>(f, v, f.dv, ahead);
  else
    add_rows<Op, T, 1>(f, v, f.dv, ahead);
  ahead.rest();
}

// Joins the block of one query to its total, as join_state does.
inline void few_join(Few &f, int l, float c) {
  const V before = splat(f.total_top[l]), other = splat(f.top[l]), now = max(before, other), low = no_inf(now);
  const V a = exp2((before - low) * splat(c)), b = exp2((other - low) * splat(c));
  float *total = f.total + l * kMostChannels, *out = f.out + l * kMostChannels;
  for (int at = 0; at < kMostChannels; at += W) {
    store(total + at, joined(load(total + at), a, load(out + at), b));
    store(out + at, V{});
  }
  f.total_top[l] = now[0], f.total_sum[l] = joined(splat(f.total_sum[l]), a, splat(f.sum[l]), b)[0];
  f.top[l] = -kInf, f.sum[l] = 0;
}

// An AddEntries function. It is not inlined, since its short loops would spill registers in a larger function.
template <class Op, int T, bool Scored>
__attribute__((noinline)) Running few_entries(const Problem &pb, const Unit &u, const Lanes &lanes, const ForwardMemory &m,
                                              const Running &state, int64_t at, int64_t begin, int64_t end,
                                              int64_t last, const Next &) {
  const Plan &plan = pb.plan;
  const Scale scale(pb);
  Pairs pairs(pb, m.terms, u.batch, true);
  Few f;
  alignas(64) float scales[kPanelRows];
  f.count = lanes.heads * lanes.rows, f.d = pb.d, f.dv = pb.dv_dim;
  // Three queries are computed as four, so the sums of the fourth are cleared too, although they are not used. The sums
  // over keys always include kFew queries.
  const size_t sums = 4 * (size_t)kMostChannels * (f.count == 3 ? 4 : f.count);
  memset((void *)&f.s, 0, sizeof f.s);
  memset((void *)&f.out, 0, sums);
  memset((void *)&f.total, 0, sums);
  memset((void *)&f.pairs, 0, sizeof f.pairs);
  for (int l = 0; l < kFew; ++l)
    f.top[l] = f.total_top[l] = -kInf, f.sum[l] = f.total_sum[l] = 0, f.shrink[l] = 1;
  const Blocks blocks(pb, m, f.count, at);
  bool several = false;
  const int pw = panel_width(0, lanes.count);  // few queries fit the first panel
  const int k_bytes = pb.d * bytes_of(pb.k.dtype), v_bytes = pb.dv_dim * bytes_of(pb.v.dtype);
  const int64_t nk = keys_of(pb, u.batch);
  Rows keys_now, keys_next, v;
  // one past the panel of row k0 of a tile
  auto panel_end = [&](int k0, int keys) {
    return pb.spacing.apart() ? panel_cut(pb.spacing, k0, keys) : (int)smaller(keys, k0 + kPanelRows);
  };
  auto set_next = [&](int64_t tile, int k0, int keys) {
    keys_next.set(pb.k, u, tile + k0, k0 < keys ? panel_end(k0, keys) - k0 : 0);
  };
  auto tile_keys = [&](int64_t e) { return (int)smaller(plan.kv_tile, nk - (int64_t)plan.col[e] * plan.kv_tile); };
  if (begin < end) set_next((int64_t)plan.col[begin] * plan.kv_tile, 0, tile_keys(begin));
  for (int64_t e = begin; e < end; ++e) {
    const int64_t first = (int64_t)plan.col[e] * plan.kv_tile;
    const int keys = tile_keys(e);
    if (keys <= 0) continue;  // past the last page
    TileMask mask;
    if (plan.bits[e] >= 0)
      mask = turn_mask((const uint32_t *)plan.masks + (ptrdiff_t)plan.bits[e] * plan.q_tile * plan.words, plan.words,
                       lanes, keys, m.mask, m.dead);
    if (Scored && pb.scoring.count) pairs.set_lanes(first, keys, pad_lanes(keys));
    TileMask kept;
    if (Scored && pb.scoring.drop) kept = kept_pairs(pb, lanes, first, keys, m.dropout);
    int counted = 0;  // `blocks` has counted the tiles of the whole up to this key
    for (int k0 = 0, n; k0 < keys; k0 += n) {
      n = panel_end(k0, keys) - k0;
      const TileMask allowed = mask.from(k0);
      if (k0 == counted) {
        uint32_t full[1];
        bool any = false;
        counted = blocks.next(mask, k0, keys, full, any);
        for (int l = 0; any && l < f.count; ++l)
          if (full[0] >> l & 1) few_join(f, l, scale.c);
        several |= any;
      }
      keys_now = keys_next;
      v.set(pb.v, u, first + k0, n);
      for (int r = 0; allowed.dead && r < n; ++r)
        if (allowed.dead[r]) v.row[r] = kZeros;
      if (n % 2) v.row[n] = kZeros;
      // Reading dominates: while the scores are computed, this panel's values are prefetched; while the values are
      // added, the next panel's keys.
      Fetch values{&v, v_bytes}, keys_ahead{&keys_next, k_bytes};
      few_products<Op, T>(f, keys_now, m.q, pw, values);
      if (pb.k.scales) row_scales(pb.k, u.batch, u.kv_head, first + k0, n, allowed.dead, unit<T>, scales);
      few_scores<Scored>(pb, f, n, allowed, pb.k.scales ? scales : nullptr);
      if (Scored && pb.scoring.count) few_terms(pairs, f, lanes, k0, n, allowed);
      const int apart = Op::depth == 2 && pb.spacing.apart() ? 2 : 1;
      if (apart == 2) few_apart(f, v, n);
      few_softmax<Op>(f, n * apart, scale.c);
      for (int l = 0; kept.rows && l < f.count; ++l)
        for (int r = 0; r < n; ++r)
          if (!(kept.rows[(ptrdiff_t)(k0 + r) * kept.words] >> l & 1)) f.s[l * kPanelRows + r * apart] = 0;
      if (pb.v.scales) {
        row_scales(pb.v, u.batch, u.kv_head, first + k0, n, allowed.dead, unit<T>, scales);
        for (int l = 0; l < f.count; ++l)
          for (int r = 0; r < n; ++r) f.s[l * kPanelRows + r] *= scales[r];
      }
#if defined(RW_PAIRS)
      for (int l = 0; Op::depth == 2 && l < f.count; ++l)
        for (int r = 0; r < n * apart; r += W)
          store_narrow(f.pairs + l * kPanelRows + r, load(f.s + l * kPanelRows + r));
#endif
      if (k0 + n < keys)
        set_next(first, k0 + n, keys);
      else if (e + 1 < last)
        set_next((int64_t)plan.col[e + 1] * plan.kv_tile, 0, tile_keys(e + 1));
      else
        set_next(0, 0, 0);
      few_values<Op, T>(f, v, keys_ahead);
    }
  }
  for (int l = 0; l < f.count; ++l) {
    if (several) few_join(f, l, scale.c);
    state.top[l] = several ? f.total_top[l] : f.top[l], state.sum[l] = several ? f.total_sum[l] : f.sum[l];
    const float *out = (several ? f.total : f.out) + l * kMostChannels;
    for (int c = 0; c < pb.dv_dim; ++c) {
      state.out[(ptrdiff_t)c * pw + l] = out[Op::depth == 2 ? besides(c) : c];
    }
  }
  return state;
}

template <class Op, bool Scored>
AddEntries *few_entries_of(const Problem &pb) {
  if constexpr (Op::depth == 2) {
    (void)pb;
    return few_entries<Op, BF16, Scored>;
  } else {
    switch (pb.k.dtype) {
      case BF16: return few_entries<Op, BF16, Scored>;
      case F16: return few_entries<Op, F16, Scored>;
      case I8: return few_entries<Op, I8, Scored>;
      case E4M3: return few_entries<Op, E4M3, Scored>;
      default: return few_entries<Op, F32, Scored>;
    }
  }
}

template <class Op, bool Scored>
inline void forward_piece(const Problem &pb, const Unit &u, const Piece &piece, const Next &next, char *block,
                          const Partials &partials) {
  const Lanes lanes = query_lanes(pb, u, piece.tile);
  const ForwardMemory m(pb, lanes.count, block);
  if (piece.begin < piece.end) pack<Op>(pb.q, lanes, pb.d, Scale(pb).packed, m.q, m.rows);
  const bool few = has_few(pb, piece.tile);
  AddEntries *many = pb.k.scales ? many_entries<Op, true> : many_entries<Op, Scored>;
  AddEntries *entries = few ? few_entries_of<Op, Scored>(pb) : many;
#if defined(RW_TILES)
  if (!few) begin_tiles(TileShapes(pb.d));
#endif
  const Running result = sum_blocks(pb, u, piece, next, lanes, m, partials, entries);
#if defined(RW_TILES)
  if (!few) end_tiles();
#endif
  if (piece.slot < 0) forward_finish(pb, lanes, m, result);
}

}  // namespace
}  // namespace ringweave
