// Forward for a task of a few query rows, such as a decoding step: reading K and V is then all the work, and channels,
// not queries, lie across the lanes. In float32 whatever the storage; the state it leaves is that of forward.h.
#pragma once
#include "forward.h"

namespace ringweave {
namespace {

// Queries of a tile, of all heads that share its keys; above, a vector of queries is full enough (measured).
constexpr int kFew = 4;
inline bool has_few(const Problem &pb, int64_t tile) { return tile_queries(pb, tile) <= kFew; }

// Rows and queries that are multiplied at a time: as many sums as registers hold.
constexpr int kKeys = 4, kValues = 16, kBeside = kRegisters == 32 ? 4 : 2;

RW_INLINE float sum_lanes(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = v[0];
  for (int i = 1; i < W; ++i) sum += v[i];
  return sum;
#endif
}
RW_INLINE float max_lanes(V v) {
  float top = v[0];
  for (int i = 1; i < W; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

// The sums of the lanes of four vectors.
RW_INLINE I4 sum_lanes(V a, V b, V c, V d) {
#if defined(__AVX512F__)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512 x = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  return (I4)_mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
#elif defined(__AVX2__)
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps((__m256)c, (__m256)d), _mm256_unpackhi_ps((__m256)c, (__m256)d));
  const __m256 x = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return (I4)_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#else
  const V ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const V cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return (I4)(__builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
#endif
}

// W channels of a row that is stored as T, over unit<T>.
template <int T>
constexpr float unit = T == E4M3 ? 256.f : 1.f;
template <int T>
RW_INLINE V load_as(const char *row, int c) {
  if constexpr (T == F32) return load(row + 4 * c);
  const char *at = row + (T == I8 || T == E4M3 ? c : 2 * c);
#if defined(__AVX512F__)
  if constexpr (T == I8) return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
  if constexpr (T == E4M3) {  // as e4m3_to_float
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

// A row stored as T: in place where it is that and fills whole vectors; else (T is F32) copied, with zeros behind.
template <int T>
RW_INLINE const char *row_as(const char *from, Dtype type, int width, float *memory) {
  if (T != F32 || (type == F32 && width % W == 0)) return from;
  widen(memory, from, type, width);
  for (int c = width; c % W; ++c) memory[c] = 0;
  return (const char *)memory;
}

struct Few {
  // aligned: a vector of theirs that lies across two cache lines costs a tenth of a step
  alignas(64) float q[kFew * kMostChannels], out[kFew * kMostChannels], s[kFew * kMostTile];
  float top[kFew], sum[kFew];
  int count, d, dv;  // d, dv: padded to whole vectors
};

// What rows that are stored with scales are multiplied by.
template <int T>
inline void few_scales(const View &t, const Unit &u, int64_t first, int keys, float *to) {
  for (int r = 0; r < keys; ++r) to[r] = scale_at(t, u.batch, u.kv_head, first + r) * unit<T>;
}

// Products of some keys that lie side by side with N queries.
template <int T, int N>
RW_INLINE void products(const View &t, int width, const char *k, int keys, int channels, const float *q, float *s,
                        const Ahead &ahead) {
  alignas(64) float memory[kKeys * kMostChannels];
  for (int r = 0; r < keys; r += kKeys) {
    ahead.fetch(r, r + kKeys);
    const char *row[kKeys];
    for (int i = 0; i < kKeys; ++i)  // behind the last that one again, for sums that nobody reads
      row[i] = row_as<T>(k + smaller(r + i, keys - 1) * t.token, t.dtype, width, memory + i * kMostChannels);
    V acc[N][kKeys];
#pragma GCC unroll 4
    for (int l = 0; l < N; ++l)
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) acc[l][i] = V{};
    for (int c = 0; c < channels; c += W) {
      V x[kKeys];
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) x[i] = load_as<T>(row[i], c);
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) {
        const V y = load(q + l * kMostChannels + c);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) acc[l][i] += x[i] * y;
      }
    }
#pragma GCC unroll 4
    for (int l = 0; l < N; ++l)
      *(I4U *)(s + l * kMostTile + r) = sum_lanes(acc[l][0], acc[l][1], acc[l][2], acc[l][3]);
  }
}

// Products of some keys that lie side by side.
template <int T>
__attribute__((noinline)) void few_products(const Problem &pb, Few &f, const char *k, int keys, float *s,
                                            const Ahead &ahead) {
  for (int l = 0; l < f.count; l += kBeside) {
    const float *q = f.q + l * kMostChannels;
    float *to = s + l * kMostTile;
    const Ahead next = l ? Ahead() : ahead;
    const int n = f.count - l;
    if (kBeside == 4 && n > 2)
      products<T, kBeside>(pb.k, pb.d, k, keys, f.d, q, to, next);
    else if (n > 1)
      products<T, 2>(pb.k, pb.d, k, keys, f.d, q, to, next);
    else
      products<T, 1>(pb.k, pb.d, k, keys, f.d, q, to, next);
  }
}

// Scores, where there are no terms: products times what their keys are scaled by, where they are allowed.
template <bool Scored>
inline void few_scores(const Problem &pb, Few &f, int keys, const TileMask &mask, const float *scales) {
  const V before = splat(Scale(pb).before);
  for (int l = 0; l < f.count; ++l) {
    float *s = f.s + l * kMostTile;
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
      if (any_equal(least, -kInf)) mark_below(pb);
      continue;
    }
    for (int r = 0; r < keys; ++r)
      if (!(mask.rows[(ptrdiff_t)r * mask.words] >> l & 1))
        s[r] = -kInf;
      else if (s[r] == -kInf)
        mark_below(pb);
  }
}

// What the terms make of them, where they are allowed.
inline void few_terms(Pairs &pairs, Few &f, const Lanes &lanes, int keys, const TileMask &mask) {
  for (int l = 0; l < f.count; ++l) {
    float *s = f.s + l * kMostTile;
    for (int r = keys; r % W; ++r) s[r] = 0;
    pairs.head = lanes.head + l / lanes.rows;
    pairs.set_rows(lanes.first + l % lanes.rows, 1);
    pairs.apply(s, 0, 1, 0, (keys + W - 1) / W * W);
    for (int r = 0; mask.rows && r < keys; ++r)
      if (!(mask.rows[(ptrdiff_t)r * mask.words] >> l & 1)) s[r] = -kInf;
  }
}

// Softmax of one row of scores, in place; returns what its sums so far shrink by.
inline float few_softmax(Few &f, int l, int keys, float c) {
  float *s = f.s + l * kMostTile;
  for (int r = keys; r % W; ++r) s[r] = -kInf;
  V tops = splat(-kInf);
  for (int r = 0; r < keys; r += W) tops = max(load(s + r), tops);
  float top = max_lanes(tops);
  if (!(top > f.top[l])) top = f.top[l];
  const V low = no_inf(splat(top));
  const V shrink = exp2((splat(f.top[l]) - low) * splat(c));
  V sum = V{};
  for (int r = 0; r < keys; r += W) {
    V p = exp2((load(s + r) - low) * splat(c));
    store(s + r, p);
    sum += p;
  }
  f.top[l] = top;
  f.sum[l] = f.sum[l] * shrink[0] + sum_lanes(sum);
  return shrink[0];
}

// Adds n rows of values to the sums of N queries, weighted with p.
template <int T, int N, int C>
RW_INLINE void add_rows(const char *const *row, const int *kept, int n, int c, const float *p, float *out) {
  V acc[N][C];  // as add_block: the products are summed from 0
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) acc[l][j] = V{};
  for (int i = 0; i < n; ++i) {
    V x[C];
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) x[j] = load_as<T>(row[i], c + j * W);
#pragma GCC unroll 4
    for (int l = 0; l < N; ++l) {
      const V weight = splat(p[l * kMostTile + kept[i]]);
#pragma GCC unroll 2
      for (int j = 0; j < C; ++j) acc[l][j] += weight * x[j];
    }
  }
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) {
      float *to = out + l * kMostChannels + c + j * W;
      store(to, load(to) + acc[l][j]);
    }
}
template <int T, int N>
RW_INLINE void add_rows(const char *const *row, const int *kept, int n, int channels, const float *p, float *out) {
  int c = 0;
  for (; c + 2 * W <= channels; c += 2 * W) add_rows<T, N, 2>(row, kept, n, c, p, out);
  if (c < channels) add_rows<T, N, 1>(row, kept, n, c, p, out);
}

// Adds some values that lie side by side, weighted with s.
template <int T>
__attribute__((noinline)) void few_values(const Problem &pb, Few &f, const char *v, int keys, Dead dead, const float *s,
                                          const Ahead &ahead) {
  alignas(64) float memory[kValues * kMostChannels];
  for (int r0 = 0; r0 < keys; r0 += kValues) {
    const char *row[kValues];
    int kept[kValues], n = 0;
    ahead.fetch(r0, r0 + kValues);
    for (int r = r0; r < r0 + kValues && r < keys; ++r)
      if (!dead || !dead[r]) {
        row[n] = row_as<T>(v + r * pb.v.token, pb.v.dtype, pb.dv_dim, memory + n * kMostChannels);
        kept[n++] = r;
      }
    for (int l = 0; l < f.count; l += kBeside) {
      const float *p = s + l * kMostTile;
      float *out = f.out + l * kMostChannels;
      if (kBeside == 4 && f.count - l > 2)
        add_rows<T, kBeside>(row, kept, n, f.dv, p, out);
      else if (f.count - l > 1)
        add_rows<T, 2>(row, kept, n, f.dv, p, out);
      else
        add_rows<T, 1>(row, kept, n, f.dv, p, out);
    }
  }
}

// AddEntries. Not inlined: its loops of a few instructions would spill to what surrounds them.
template <int T, bool Scored>
__attribute__((noinline)) void few_entries(const Problem &pb, const Unit &u, const Lanes &lanes, const ForwardMemory &m,
                                           const Running &state, int64_t begin, int64_t end, int64_t last) {
  const Plan &plan = pb.plan;
  const Scale scale(pb);
  Pairs pairs(pb, m.terms, u.batch, true);
  Few f;
  alignas(64) float scales[kMostTile];
  f.count = lanes.heads * lanes.rows, f.d = (pb.d + W - 1) / W * W, f.dv = (pb.dv_dim + W - 1) / W * W;
  memset(f.q, 0, sizeof f.q);  // of queries that fill up a block too, whose sums nobody reads
  memset(f.s, 0, sizeof f.s);
  memset(f.out, 0, sizeof f.out);
  for (int l = 0; l < f.count; ++l) {
    float *q = f.q + l * kMostChannels;
    widen(q, lane_row(pb.q, lanes, l), pb.q.dtype, pb.d);
    for (int c = 0; scale.sign <= 0 && c < pb.d; ++c) q[c] *= (float)scale.sign;
    f.top[l] = -kInf, f.sum[l] = 0;
  }
  const int64_t nk = keys_of(pb, u.batch);
  for (int64_t e = begin; e < end; ++e) {
    const int64_t first = (int64_t)plan.col[e] * plan.kv_tile;
    const int keys = (int)smaller(plan.kv_tile, nk - first);
    if (keys <= 0) continue;  // of no page
    TileMask mask;
    if (plan.bits[e] >= 0)
      mask = turn_mask((const uint32_t *)plan.masks + (ptrdiff_t)plan.bits[e] * plan.q_tile * plan.words, plan.words,
                       lanes, keys, m.mask, m.dead);
    // Reading is all the work: the scores fetch this tile's values, the values the next tile's keys, half and half.
    const int run = run_of(pb.k, keys);
    for (int r = 0; r < keys; r += run) {
      const int n = (int)smaller(run, keys - r);
      const Ahead values(pb.v, u.batch, u.kv_head, first + r, n, pb.dv_dim);
      few_products<T>(pb, f, token_at(pb.k, u.batch, u.kv_head, first + r), n, f.s + r, values);
    }
    if (pb.k.scales) few_scales<T>(pb.k, u, first, keys, scales);
    few_scores<Scored>(pb, f, keys, mask, pb.k.scales ? scales : nullptr);
    if (Scored && pb.scoring.count) {
      pairs.set_lanes(first, keys, pad_lanes(keys));
      few_terms(pairs, f, lanes, keys, mask);
    }
    float shrink[kFew];
    for (int l = 0; l < f.count; ++l) {
      shrink[l] = few_softmax(f, l, keys, scale.c);
      for (int c = 0; c < f.dv; c += W) {
        float *out = f.out + l * kMostChannels + c;
        store(out, load(out) * splat(shrink[l]));
      }
    }
    if (Scored && pb.scoring.drop) {
      const TileMask kept = kept_pairs(pb, lanes, first, keys, m.dropout);
      for (int l = 0; l < f.count; ++l)
        for (int r = 0; r < keys; ++r)
          if (!(kept.rows[(ptrdiff_t)r * kept.words] >> l & 1)) f.s[l * kMostTile + r] = 0;
    }
    if (pb.v.scales) {
      few_scales<T>(pb.v, u, first, keys, scales);
      for (int l = 0; l < f.count; ++l)
        for (int r = 0; r < keys; ++r) f.s[l * kMostTile + r] *= scales[r];
    }
    const int64_t then = e + 1 < last ? (int64_t)plan.col[e + 1] * plan.kv_tile : nk;
    for (int r = 0; r < keys; r += run) {
      const int n = (int)smaller(run, keys - r);
      Ahead next;
      if (then + r < nk) next = Ahead(pb.k, u.batch, u.kv_head, then + r, (int)smaller(n, nk - then - r), pb.d);
      few_values<T>(pb, f, token_at(pb.v, u.batch, u.kv_head, first + r), n, mask.from(r).dead, f.s + r, next);
    }
  }
  const int pw = panel_width(0, lanes.count);  // a few lanes lie in the first panel
  for (int l = 0; l < f.count; ++l) {
    state.top[l] = f.top[l], state.sum[l] = f.sum[l];
    for (int c = 0; c < pb.dv_dim; ++c) state.out[(ptrdiff_t)c * pw + l] = f.out[l * kMostChannels + c];
  }
}

template <bool Scored>
AddEntries *few_entries_of(const Problem &pb) {
  // rows that do not fill whole vectors are widened into memory
  if (pb.d % W || pb.dv_dim % W) return few_entries<F32, Scored>;
  switch (pb.k.dtype) {
    case BF16: return few_entries<BF16, Scored>;
    case F16: return few_entries<F16, Scored>;
    case I8: return few_entries<I8, Scored>;
    case E4M3: return few_entries<E4M3, Scored>;
    default: return few_entries<F32, Scored>;
  }
}

template <class Op, bool Scored>
inline void forward_piece(const Problem &pb, const Unit &u, const Piece &piece, char *block, const Partials &partials) {
  const Lanes lanes = query_lanes(pb, u, piece.tile);
  const ForwardMemory m(pb, lanes.count, block);
  AddEntries *entries = many_entries<Op, Scored>;
  if constexpr (Op::depth == 1)  // a build with pairs leaves few queries to the one that it adds to
    if (has_few(pb, piece.tile)) entries = few_entries_of<Scored>(pb);
  if (piece.begin < piece.end && !(Op::depth == 1 && has_few(pb, piece.tile)))
    pack<Op>(pb.q, lanes, pb.d, Scale(pb).sign, m.q, m.rows);
  const Running result = sum_blocks(pb, u, piece, lanes, m, partials, entries);
  if (piece.slot < 0) forward_finish(pb, lanes, m, result);
}

}  // namespace
}  // namespace ringweave
