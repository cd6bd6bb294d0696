// The keys and values that forward of a few queries reads: addresses of rows and what is prefetched of them, loads of W
// channels of a row, and words of W keys that are transposed so that lanes are keys.
#pragma once
#include "terms.h"

namespace ringweave {
namespace {

alignas(64) constexpr char kZeros[4 * kMostChannels] = {};

// Addresses of a panel's rows.
struct Rows {
  const char *row[kPanelRows];
  int n = 0;
  // Ranges of memory that hold the rows and their scales: adjacent rows are one range.
  struct {
    const char *begin, *end;
  } range[2 * kPanelRows];
  int ranges = 0;
  // Sets `count` rows, those from `first` on, or those at places counted from it. After the last row, its address is
  // repeated; the products there are not used.
  void set(const View &t, const Unit &u, int64_t first, int count, int width, const uint8_t *places) {
    n = count, ranges = 0;
    for (int r = 0; !count && r < kPanelRows; ++r) row[r] = kZeros;
    for (int r = 0, end; r < count; r = end) {
      const int64_t token = first + (places ? places[r] : r);
      for (end = places ? r + 1 : count; end < count && places[end] - places[r] == end - r;) ++end;
      end = r + run_of(t, token, end - r);
      const char *from = token_at(t, u.batch, u.kv_head, token);
      const ptrdiff_t step = t.token;
      const char *at = from;  // a sum, since the compiler would make vectors of slow products
      for (int i = r; i < end; ++i, at += step) row[i] = at;
      add(from, step, width * bytes_of(t.dtype), end - r);
      if (t.scales) add(token_at(*t.scales, u.batch, u.kv_head, token), t.scales->token, 4, end - r);
    }
    for (int r = count; count && r < kPanelRows; ++r) row[r] = row[count - 1];
  }

 private:
  void add(const char *from, ptrdiff_t step, ptrdiff_t bytes, int rows) {
    if (step == bytes) bytes *= rows, rows = 1;
    for (; rows; --rows, from += step) range[ranges++] = {from, from + bytes};
  }
};

// Prefetches the rows that are needed next while others are processed, in memory order, which the hardware prefetcher
// also follows. A processor drops prefetches while many lines are on their way, so a long range is prefetched twice.
struct Fetch {
  static constexpr ptrdiff_t kAgain = 2048;  // distance of the second time, in bytes (measured)
  const Rows &rows;
  int next = 0;  // range
  const char *at = nullptr, *end = nullptr, *again = nullptr;
  // The first lines of all pages at once: the hardware follows each from there (a sixth faster).
  explicit Fetch(const Rows &rows) : rows(rows) {
    if (rows.ranges > 2 * kPanelRows / kLeastPage) return;
    for (int i = 0; i < rows.ranges; ++i)
      __builtin_prefetch(rows.range[i].begin), __builtin_prefetch(rows.range[i].begin + 64);
  }
  RW_INLINE void line() {
    if (at >= end) {
      if (next == rows.ranges) return;
      at = (const char *)((uintptr_t)rows.range[next].begin & ~(uintptr_t)63), end = rows.range[next++].end;
      again = at + kAgain;
    }
    __builtin_prefetch(at);
    if (at >= again) __builtin_prefetch(at - kAgain);
    at += 64;
  }
  // Prefetches the remaining lines.
  void rest() {
    while (at < end || next < rows.ranges) line();
  }
};

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
  turn_fourths(x);
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
  if constexpr (T == BF16) {  // one shuffle for widening and shift
    const __m256i upper = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                           -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return (V)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(x), upper);
  }
  return (V)_mm256_cvtph_ps(x);
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

// Channel i of W words, divided by unit<T>. The bytes before the words may be read too.
template <int T>
RW_INLINE V channel(const char *words, int i) {
  if constexpr (in_word<T> == 1) return load(words);
  // The channel in the highest bits, above any others. With AVX2 a load at another byte replaces a shift, which would
  // compete with multiply-adds.
  constexpr int bits = 32 / in_word<T>;
  const int above = in_word<T> - 1 - i;
#if defined(__AVX2__) && !defined(__AVX512F__)
  const U top = (U)load(words - above * (bits / 8));
#else
  const U top = (U)load(words) << above * bits;
#endif
  if constexpr (T == BF16) return (V)(top & 0xffff0000u);
  if constexpr (T == I8) return __builtin_convertvector((I)top >> 24, V);
  // E4M3: the value as a half, which has an exponent of 5 bits
  const U magnitude = top >> 4 & 0x07f00000u, nan = (U)(magnitude == 0x07f00000u) & 0x7fc00000u;
  return (V)((U)((V)magnitude * splat(0x1p112f)) | nan | (top & 0x80000000u));
}

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

constexpr int kTurnedWords = 16;  // a cache line, so that each line of the keys is read at once

// The words of a panel's keys, transposed: kTurnedWords words from one channel on, each of all keys.
struct Turned {
  alignas(64) char before[64];  // `channel` reads up to three of these bytes
  float words[kTurnedWords][kPanelRows];
  const char *at(int word, int key) const { return (const char *)this + sizeof before + 4 * (word * kPanelRows + key); }
};

}  // namespace
}  // namespace ringweave
