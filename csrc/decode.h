// Forward for a task of a few query rows, such as a decoding step: reading K and V is then all the work, and channels,
// not queries, lie across the lanes. In float32 whatever the storage; the state it leaves is that of forward.h.
#pragma once
#include "forward.h"

namespace ringweave {
namespace {

// Queries of a tile, of all heads that share its keys; above, a vector of queries is full enough (measured).
constexpr int kFew = 4;
template <class Op>
constexpr int few_rows = Op::depth == 2 ? 2 : kFew;

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

// W channels of a row that is stored as T.
template <int T>
RW_INLINE V load_as(const char *row, int c) {
  if constexpr (T == F32) return load(row + 4 * c);
#if defined(__AVX512F__)
  const __m256i x = _mm256_loadu_si256((const __m256i *)(row + 2 * c));
  return T == BF16 ? (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16) : (V)_mm512_cvtph_ps(x);
#elif defined(__AVX2__)
  const __m128i x = _mm_loadu_si128((const __m128i *)(row + 2 * c));
  return T == BF16 ? (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16) : (V)_mm256_cvtph_ps(x);
#else
  V v;
  for (int i = 0; i < W; ++i) {
    uint16_t h;
    memcpy(&h, row + 2 * (c + i), 2);
    v[i] = T == BF16 ? float_of((uint32_t)h << 16) : half_to_float(h);
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

// Products of one tile: scores, where there are no terms.
template <int T, bool Scored>
inline void few_scores(const Problem &pb, const Unit &u, Few &f, int64_t first, int keys, const TileMask &mask,
                       const Ahead &ahead) {
  const float before = Scale(pb).before;
  alignas(64) float memory[kMostChannels];
  const char *k = row_at(pb.k, u.batch, u.kv_head, first);
  for (int r = 0; r < keys; ++r, k += pb.k.token) {
    ahead.fetch(r, r + 1);
    const char *row = row_as<T>(k, pb.k.dtype, pb.d, memory);
    const uint32_t allowed = mask.rows ? mask.rows[(ptrdiff_t)r * mask.words] : ~0u;
    for (int l = 0; l < f.count; ++l) {
      V a = V{}, b = V{};
      int c = 0;
      for (; c + 2 * W <= f.d; c += 2 * W) {
        a += load_as<T>(row, c) * load(f.q + l * kMostChannels + c);
        b += load_as<T>(row, c + W) * load(f.q + l * kMostChannels + c + W);
      }
      if (c < f.d) a += load_as<T>(row, c) * load(f.q + l * kMostChannels + c);
      float score = -kInf;
      if (allowed >> l & 1) {
        score = sum_lanes(a + b);
        if (score == -kInf) mark_below(pb);
        if (Scored) score *= before;
      }
      f.s[l * kMostTile + r] = score;
    }
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

template <int T>
inline void few_values(const Problem &pb, const Unit &u, Few &f, int64_t first, int keys, Dead dead,
                       const float *shrink, const Ahead &ahead) {
  constexpr int rows = 8;  // of V at a time: their products are added while `out` is in registers
  alignas(64) float memory[rows * kMostChannels];
  for (int l = 0; l < f.count; ++l)
    for (int c = 0; c < f.dv; c += W) {
      float *out = f.out + l * kMostChannels + c;
      store(out, load(out) * splat(shrink[l]));
    }
  for (int r0 = 0; r0 < keys; r0 += rows) {
    const char *row[rows];
    int kept[rows], n = 0;
    ahead.fetch(r0, r0 + rows);
    for (int r = r0; r < r0 + rows && r < keys; ++r)
      if (!dead || !dead[r]) {
        const char *from = row_at(pb.v, u.batch, u.kv_head, first + r);
        row[n] = row_as<T>(from, pb.v.dtype, pb.dv_dim, memory + n * kMostChannels);
        kept[n++] = r;
      }
    for (int l = 0; l < f.count; ++l) {
      const float *p = f.s + l * kMostTile;
      for (int c = 0; c < f.dv; c += W) {
        V acc{};  // as add_block: the products are summed from 0
        for (int i = 0; i < n; ++i) acc += splat(p[kept[i]]) * load_as<T>(row[i], c);
        store(f.out + l * kMostChannels + c, load(f.out + l * kMostChannels + c) + acc);
      }
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
  f.count = lanes.heads * lanes.rows, f.d = (pb.d + W - 1) / W * W, f.dv = (pb.dv_dim + W - 1) / W * W;
  for (int l = 0; l < f.count; ++l) {
    float *q = f.q + l * kMostChannels;
    widen(q, lane_row(pb.q, lanes, l), pb.q.dtype, pb.d);
    for (int c = pb.d; c % W; ++c) q[c] = 0;
    for (int c = 0; scale.sign <= 0 && c < pb.d; ++c) q[c] *= (float)scale.sign;
    memset(f.out + l * kMostChannels, 0, 4 * kMostChannels);
    f.top[l] = -kInf, f.sum[l] = 0;
  }
  for (int64_t e = begin; e < end; ++e) {
    const int64_t first = (int64_t)plan.col[e] * plan.kv_tile;
    const int keys = (int)smaller(plan.kv_tile, pb.nk - first);
    TileMask mask;
    if (plan.bits[e] >= 0)
      mask = turn_mask((const uint32_t *)plan.masks + (ptrdiff_t)plan.bits[e] * plan.q_tile * plan.words, plan.words,
                       lanes, keys, m.mask, m.dead);
    // Reading is all the work: the scores fetch this tile's values, the values the next tile's keys, half and half.
    const Ahead values(pb.v, u.batch, u.kv_head, first, keys, pb.dv_dim);
    Ahead next;
    if (e + 1 < last) {
      const int64_t then = (int64_t)plan.col[e + 1] * plan.kv_tile;
      next = Ahead(pb.k, u.batch, u.kv_head, then, (int)smaller(plan.kv_tile, pb.nk - then), pb.d);
    }
    few_scores<T, Scored>(pb, u, f, first, keys, mask, values);
    if (Scored && pb.scoring.count) {
      pairs.set_lanes(first, keys, pad_lanes(keys));
      few_terms(pairs, f, lanes, keys, mask);
    }
    float shrink[kFew];
    for (int l = 0; l < f.count; ++l) shrink[l] = few_softmax(f, l, keys, scale.c);
    if (Scored && pb.scoring.drop) {
      const TileMask kept = kept_pairs(pb, lanes, first, keys, m.dropout);
      for (int l = 0; l < f.count; ++l)
        for (int r = 0; r < keys; ++r)
          if (!(kept.rows[(ptrdiff_t)r * kept.words] >> l & 1)) f.s[l * kMostTile + r] = 0;
    }
    few_values<T>(pb, u, f, first, keys, mask.dead, shrink, next);
  }
  const int pw = panel_width(0, lanes.count);  // a few lanes lie in the first panel
  for (int l = 0; l < f.count; ++l) {
    state.top[l] = f.top[l], state.sum[l] = f.sum[l];
    for (int c = 0; c < pb.dv_dim; ++c) state.out[(ptrdiff_t)c * pw + l] = f.out[l * kMostChannels + c];
  }
}

template <class Op, bool Scored>
inline void forward_piece(const Problem &pb, const Unit &u, const Piece &piece, char *block, const Partials &partials) {
  const Lanes lanes = query_lanes(pb, u, piece.tile);
  const ForwardMemory m(pb, lanes.count, block);
  auto entries = many_entries<Op, Scored>;
  if (tile_queries(pb, piece.tile) <= few_rows<Op>) {
    // more rows share the widening of K and V
    const bool widened = pb.q.dtype == F32 || lanes.heads * lanes.rows > 2 || pb.d % W || pb.dv_dim % W;
    entries = widened                ? few_entries<F32, Scored>
              : pb.q.dtype == BF16 ? few_entries<BF16, Scored>
                                   : few_entries<F16, Scored>;
  } else if (piece.begin < piece.end) {
    pack<Op>(pb.q, lanes, pb.d, Scale(pb).sign, m.q, m.rows);
  }
  const Running result = sum_blocks(pb, u, piece, lanes, m, partials, entries);
  if (piece.slot < 0) forward_finish(pb, lanes, m, result);
}

}  // namespace
}  // namespace ringweave
