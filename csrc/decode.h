// Forward for a task of a few query rows, such as a decoding step, which is bound by reading K and V. For scores, the
// lanes are keys, and K is transposed in registers; for sums of values, the lanes are channels. Each number is the sum
// of the same products in the same order as in forward.h, so a row has the same bits.
#pragma once
#include "forward.h"
#include "words.h"

namespace ringweave {
namespace {

// Number of vectors of channels that are summed together for n queries, so that the sums fit the registers (measured).
constexpr int vectors_of(int n) { return kRegisters == 16 && n == 4 ? 2 : 4; }

typedef float F4 __attribute__((vector_size(16)));

// Lanes 4 i to 4 i + 3.
RW_INLINE F4 fourth_of(V x, int i) {
  F4 parts[W / 4];
  memcpy((void *)parts, &x, sizeof x);
  return parts[i];
}

// The largest lane of each vector, and not less than `least`.
RW_INLINE F4 max_lanes(V (&x)[kFew], F4 least) {
  turn_fourths(x);
  const V top = max(max(x[0], x[1]), max(x[2], x[3]));
  for (int i = 0; i < W / 4; ++i) {
    const F4 part = fourth_of(top, i);
    least = part > least ? part : least;
  }
  return least;
}

// Number of products per word of K: one for each channel, or a single product of the whole word with pairs.
template <class Op, int T>
constexpr int parts = Op::depth == 2 ? 1 : in_word<T>;

// Bytes of the keys or values of a panel that is prefetched one panel earlier than others (measured).
constexpr int kLargePanel = 32 << 10;

struct Panel {
  Rows keys, values;
};

struct Few {
  // aligned, since vectors that cross cache lines make a step a tenth slower
  alignas(64) float s[kFew * kPanelRows], out[kFew * kMostChannels], total[kFew * kMostChannels];
  alignas(64) uint16_t pairs[kFew * kPanelRows];  // weights in bfloat16, in builds with pairs
  float sum[kFew], total_top[kFew], total_sum[kFew];
  alignas(64) float top[larger(kFew, W)] = {}, shrink[larger(kFew, W)];  // whole vectors
  int count, d, dv;
};

// Adds the products of G vectors of keys, from row r of a panel on, with N queries, for the first `words` words.
template <class Op, int T, int N, int G>
RW_INLINE void add_words(Few &f, const Turned &turned, int r, bool first, int words, const float *q, int pw,
                         Fetch &ahead) {
  V acc[N][G];
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[l][g] = first ? V{} : load(f.s + l * kPanelRows + r + g * W);
  for (int w = 0; w < words; ++w) {
#pragma GCC unroll 4
    for (int i = 0; i < parts<Op, T>; ++i, q += pw) {
      V x[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const char *at = turned.at(w, r + g * W);
        x[g] = Op::depth == 2 ? load(at) : channel<T>(at, i);
      }
#pragma GCC unroll 4
      for (int l = 0; l < N; ++l) {
        const V of_query = splat(q[l]);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) acc[l][g] = Op::madd(x[g], of_query, acc[l][g]);
      }
    }
    constexpr int bytes = G * W * word_bytes<T>;  // spread evenly: as many lines as the words have
#pragma GCC unroll 8
    for (int i = 0; i < bytes / 64; ++i) ahead.line();
    if (bytes < 64 && w % larger(1, 64 / bytes) == 0) ahead.line();
  }
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) store(f.s + l * kPanelRows + r + g * W, acc[l][g]);
}

// Computes the products of a panel of keys with N queries, each a sum over channels from first to last. All keys of a
// panel are transposed before the sums, and several vectors of keys are summed at once: independent chains hide the
// latency of additions.
template <class Op, int T, int N>
RW_INLINE void products(Few &f, const Rows &k, const float *q, int pw, Fetch &ahead) {
  constexpr int G = (int)smaller(kPanelRows / W, 8 / N);
  Turned turned;
  const int all = f.d / in_word<T>;
  for (int w0 = 0; w0 < all; w0 += kTurnedWords, q += (ptrdiff_t)kTurnedWords * parts<Op, T> * pw) {
    const int words = (int)smaller(kTurnedWords, all - w0);
    for (int r = 0; r < k.n; r += W)
#pragma GCC unroll 4
      for (int w = 0; w < kTurnedWords; w += W) {
        if (w >= words) break;
        V x[W];
        load_words<T>(k.row + r, (ptrdiff_t)(w0 + w) * word_bytes<T>, words - w, x);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(turned.words[w + i] + r, x[i]);
      }
    int r = 0;
    for (; r + (G - 1) * W < k.n; r += G * W) add_words<Op, T, N, G>(f, turned, r, w0 == 0, words, q, pw, ahead);
    for (; r < k.n; r += W) add_words<Op, T, N, 1>(f, turned, r, w0 == 0, words, q, pw, ahead);
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
    V least = splat(kInf);  // lanes after the last key repeat it (see Rows::set)
    for (int r = 0; r < keys; r += W) {
      V x = load(s + r);
      if (scales) x *= load(scales + r);
      if (Scored) x *= before;
      least = min(x, least);
      store(s + r, x);
    }
    if (!mask.rows) {
      if (any_below(least, -scale.most)) mark(pb.below);
      continue;
    }
    for (int r = 0; r < keys; ++r)
      if (!(mask.rows[(ptrdiff_t)r * mask.words] >> l & 1))
        s[r] = -kInf;
      else if (s[r] < -scale.most)
        mark(pb.below);
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

// Adds W weights of each query to a sum, from first to last key in the order in which `exponentials` adds them.
template <class Op>
RW_INLINE F4 add_keys(V (&p)[kFew], F4 sum) {
  turn_fourths(p);
#pragma GCC unroll 4
  for (int i = 0; i < W / 4; ++i) {
    if (Op::depth == 2) {
      sum += fourth_of(p[0], i) + fourth_of(p[1], i);
      sum += fourth_of(p[2], i) + fourth_of(p[3], i);
    } else {
#pragma GCC unroll 4
      for (int l = 0; l < kFew; ++l) sum += fourth_of(p[l], i);
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

// Replaces a panel's scores of N queries by weights in place, and updates maxima, sums and the factors by which earlier
// sums shrink.
template <class Op, int N>
RW_INLINE void softmax(Few &f, int keys, float c) {
  V top[kFew];
  for (int l = 0; l < kFew; ++l) top[l] = splat(-kInf);
  for (int l = 0; l < N; ++l) {
    float *s = f.s + l * kPanelRows;
    for (int r = keys; r % W; ++r) s[r] = -kInf;
    for (int r = 0; r < keys; r += W) top[l] = max(load(s + r), top[l]);
  }
  const V before = load(f.top), cv = splat(c);
  F4 now, sum = {};
  memcpy(&now, f.top, sizeof now);
  now = max_lanes(top, now);
  memcpy(f.top, &now, sizeof now);
  store(f.shrink, exp2((before - no_inf(load(f.top))) * cv));
  V low[N];
  for (int l = 0; l < N; ++l) low[l] = no_inf(splat(f.top[l]));
  for (int r = 0; r < keys; r += W) {
    V p[kFew] = {};
#pragma GCC unroll 4
    for (int l = 0; l < N; ++l) {
      float *s = f.s + l * kPanelRows + r;
      p[l] = exp2((load(s) - low[l]) * cv);
      store(s, p[l]);
    }
    sum = add_keys<Op>(p, sum);
  }
  for (int l = 0; l < N; ++l) f.sum[l] = fused(f.sum[l], f.shrink[l], sum[l]);
}
template <class Op>
__attribute__((noinline)) void few_softmax(Few &f, int keys, float c) {
  if (f.count > 2)
    softmax<Op, 4>(f, keys, c);
  else if (f.count == 2)
    softmax<Op, 2>(f, keys, c);
  else
    softmax<Op, 1>(f, keys, c);
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
  constexpr int M = Op::depth * C, bytes = M * W * bytes_of((Dtype)T) * Op::depth;  // bytes that are added at once
  V acc[N][M];
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) acc[l][j] = V{};
  for (int r = 0; r < n; r += Op::depth) {
    V x[M];
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
      for (int j = 0; j < M; ++j) acc[l][j] = Op::madd(x[j], weight, acc[l][j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < bytes / 64; ++i) ahead.line();
    if (bytes < 64 && r % (Op::depth * larger(1, 64 / bytes)) == 0) ahead.line();
  }
#pragma GCC unroll 4
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) {
      float *to = out + l * kMostChannels + c + j * W;
      store(to, fused(load(to), splat(f.shrink[l]), acc[l][j]));
    }
}

template <class Op, int T, int N>
RW_INLINE void add_rows(Few &f, const Rows &v, int dv, Fetch &ahead) {
  constexpr int channels = Op::depth * W, size = bytes_of((Dtype)T);
  constexpr int most = vectors_of(N) / Op::depth;
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
  const int most = (f.dv + 2 * W - 1) / (2 * W) * 2 * W;  // see `besides`
  for (int at = 0; at < most; at += W) {
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
  const int64_t nk = keys_of(pb, u.batch);
  Panel panels[2];
  Panel *now = &panels[0], *ahead = &panels[1];
  // Reading dominates. Beside the scores this panel's values are prefetched, and beside the sums the next panel's keys.
  // Many lines of a large panel would still be on their way when they are needed, so large panels are prefetched one
  // panel earlier: the next panel's keys beside the scores, and its values beside the sums.
  const bool far = kPanelRows * larger(pb.d, pb.dv_dim) * bytes_of((Dtype)T) >= kLargePanel && !pb.k.chosen;
  Places of_entries[2];  // of even and of odd entries
  const auto places_of = [&](int64_t e) {
    return entry_places<Op>(pb, u.batch, e, lanes.rows, true, of_entries[e & 1]);
  };
  // one past the panel of row k0 of a tile
  auto panel_end = [&](const Places *places, int k0, int keys) {
    return pb.spacing.apart() ? panel_cut(pb.spacing, k0, keys) : chunk_end(pb.spacing, places, k0, keys);
  };
  auto set_ahead = [&](const Places *places, int64_t tile, int k0, int keys) {
    const int n = k0 < keys ? panel_end(places, k0, keys) - k0 : 0;
    const uint8_t *at = places ? places->row + k0 : nullptr;
    ahead->keys.set(pb.k, u, places ? tile : tile + k0, n, pb.d, at);
    ahead->values.set(pb.v, u, places ? tile : tile + k0, n, pb.dv_dim, at);
  };
  auto tile_keys = [&](int64_t e) { return (int)smaller(plan.kv_tile, nk - (int64_t)plan.col[e] * plan.kv_tile); };
  const Places *places, *places_ahead = nullptr;
  auto set_first = [&](int64_t e) {
    places_ahead = places_of(e);
    set_ahead(places_ahead, (int64_t)plan.col[e] * plan.kv_tile, 0, places_ahead ? places_ahead->count : tile_keys(e));
  };
  if (begin < end) set_first(begin);
  if (begin < end && far) Fetch(ahead->values).rest();
  for (int64_t e = begin; e < end; ++e) {
    const int64_t first = (int64_t)plan.col[e] * plan.kv_tile;
    int keys = tile_keys(e);
    if (keys <= 0) continue;  // past the last page
    places = places_ahead;
    TileMask mask;
    if (plan.mask_id[e] >= 0)
      mask = turn_mask((const uint32_t *)plan.mask_words + (ptrdiff_t)plan.mask_id[e] * plan.q_tile * plan.words, plan.words,
                       lanes, keys, m.mask, m.dead);
    if (Scored && pb.score_terms.count) pairs.set_lanes(first, keys, pad_lanes(keys));
    TileMask kept;
    if (Scored && pb.score_terms.drop) kept = kept_pairs(pb, lanes, first, keys, m.dropout);
    if (places) keys = keep_places(*places, mask, kept, m);
    const auto set_scales = [&](const View &t, int k0, int n, Dead dead) {
      if (places)
        row_scales(t, u.batch, u.kv_head, first, n, dead, unit<T>, scales, places->row + k0);
      else
        row_scales(t, u.batch, u.kv_head, first + k0, n, dead, unit<T>, scales);
    };
    int counted = 0;  // `blocks` has counted the tiles of the whole up to this key
    for (int k0 = 0, n; k0 < keys; k0 += n) {
      n = panel_end(places, k0, keys) - k0;
      const TileMask allowed = mask.from(k0);
      if (k0 == counted) {
        uint32_t full[1];
        bool any = false;
        counted = blocks.next(mask, k0, keys, full, any);
        for (int l = 0; any && l < f.count; ++l)
          if (full[0] >> l & 1) few_join(f, l, scale.c);
        several |= any;
      }
      Panel *const done = now;
      now = ahead, ahead = done;
      if (k0 + n < keys)
        set_ahead(places, first, k0 + n, keys);
      else if (e + 1 < last)
        set_first(e + 1);
      else
        set_ahead(nullptr, 0, 0, 0);
      Rows &v = now->values;
      for (int r = 0; allowed.dead && r < n; ++r)
        if (allowed.dead[r]) v.row[r] = kZeros;
      if (n % 2) v.row[n] = kZeros;
      Fetch beside_scores(far ? ahead->keys : v);
      few_products<Op, T>(f, now->keys, m.q, pw, beside_scores);
      if (pb.k.scales) set_scales(pb.k, k0, n, allowed.dead);
      few_scores<Scored>(pb, f, n, allowed, pb.k.scales ? scales : nullptr);
      if (Scored && pb.score_terms.count) few_terms(pairs, f, lanes, k0, n, allowed);
      const int apart = Op::depth == 2 && pb.spacing.apart() ? 2 : 1;
      if (apart == 2) few_apart(f, v, n);
      few_softmax<Op>(f, n * apart, scale.c);
      for (int l = 0; kept.rows && l < f.count; ++l)
        for (int r = 0; r < n; ++r)
          if (!(kept.rows[(ptrdiff_t)(k0 + r) * kept.words] >> l & 1)) f.s[l * kPanelRows + r * apart] = 0;
      if (pb.v.scales) {
        set_scales(pb.v, k0, n, allowed.dead);
        for (int l = 0; l < f.count; ++l) {
          float *p = f.s + l * kPanelRows;
          for (int r = 0; r < n; r += W) store(p + r, load(p + r) * load(scales + r));
        }
      }
#if defined(RW_PAIRS)
      for (int l = 0; Op::depth == 2 && l < f.count; ++l)
        for (int r = 0; r < n * apart; r += W)
          store_narrow(f.pairs + l * kPanelRows + r, load(f.s + l * kPanelRows + r));
#endif
      Fetch beside_sums(far ? ahead->values : ahead->keys);
      few_values<Op, T>(f, v, beside_sums);
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
  if (pb.selects && !may_have_spread(pb, lanes, m.rows)) return;
  if (piece.begin < piece.end) pack<Op>(pb.q, lanes, pb.d, Scale(pb).packed, m.q, m.rows);
  const bool few = has_few(pb, piece.tile);
  AddEntries *many = pb.k.scales ? many_entries<Op, true> : many_entries<Op, Scored>;
  AddEntries *entries = few ? few_entries_of<Op, Scored>(pb) : many;
  const Running result = sum_blocks(pb, u, piece, next, lanes, m, partials, entries);
  if (piece.slot < 0) forward_finish(pb, lanes, m, result);
}

}  // namespace
}  // namespace ringweave
