// The five products of backward for one query tile and one panel of keys.
#pragma once
#include <sched.h>

#include "forward.h"

namespace ringweave {
namespace {

constexpr int kBackwardRows = kPanelRows;  // number of rows of P and dS that are computed together

// The most lanes of the keys of an entry that are packed by themselves (measured; see keep_few).
inline int most_few(int lanes) { return lanes * 3 / 4; }

struct BackwardMemory {
  float *x, *y, *dx, *p, *p_pair, *ds, *ds_rows;  // x, y: K and V across lanes
  PerLane<float> low, delta;
  float *keys, *dt;  // keys: K with channels across lanes; dt: gradient of the scores after the terms
  float *few_x, *few_y, *few_dx, *few_keys;  // see keep_few
  char *a, *b, *a_columns, *b_columns, *rows;
  uint32_t *mask;
  uint8_t *dead, *broken, *bad, *few_bad;  // broken: see broken_rows; bad: keys with a NaN or an infinity
  TermMemory terms;
  DropoutMemory dropout;
  size_t bytes;
  BackwardMemory(const Problem &pb, int lanes, char *block) {
    Carve m{block};
    const int width = (int)larger(pb.d, pb.dv_dim), q = pb.plan.q_tile, k = pb.plan.kv_tile,
              panel = kBackwardRows * kWide * W;
    x = m.take<float>((size_t)lanes * pb.d);
    y = m.take<float>((size_t)lanes * pb.dv_dim);
    dx = m.take<float>((size_t)lanes * (pb.d + pb.dv_dim));
    p = m.take<float>(panel), p_pair = m.take<float>(panel), ds = m.take<float>(panel), ds_rows = m.take<float>(panel);
    low = {m, (size_t)larger(lanes, q)}, delta = {m, (size_t)q};
    keys = m.take<float>((size_t)k * pad_lanes(pb.d));
    a = m.take<char>((size_t)larger(q, k) * pb.d * 4);
    b = m.take<char>((size_t)q * pb.dv_dim * 4);
    a_columns = m.take<char>((size_t)q * pb.d * 4);
    b_columns = m.take<char>((size_t)q * pb.dv_dim * 4);
    rows = m.take<char>((size_t)width * 4 * W);
    mask = m.take<uint32_t>((size_t)q * pb.plan.words);
    dead = m.take<uint8_t>(larger(q, k));
    broken = m.take<uint8_t>(q), bad = m.take<uint8_t>(k);
    dt = m.take<float>(pb.score_terms.any() ? panel : 0);
    const size_t few = pb.score_terms.any() ? 0 : (size_t)most_few(lanes);
    few_x = m.take<float>(few * pb.d), few_y = m.take<float>(few * pb.dv_dim);
    few_dx = m.take<float>(few * (pb.d + pb.dv_dim)), few_keys = m.take<float>(few * pad_lanes(pb.d));
    few_bad = m.take<uint8_t>(few);
    terms = TermMemory(pb, m, lanes, true);
    dropout = DropoutMemory(pb, m, q);
    bytes = (size_t)(m.at - block);
  }
};

// Stores a block of M rows as the streamed side of a contraction over rows. With pairs, rows 2i and 2i + 1 are
// interleaved.
template <int M, int N>
RW_INLINE void keep(float *to, int r, V (&x)[M][N], Single) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(to + ((r + i) * N + j) * W, x[i][j]);
}
#if defined(RW_PAIRS)
template <int M, int N>
RW_INLINE void keep(float *to, int r, V (&x)[M][N], Pair) {
#pragma GCC unroll 16
  for (int i = 0; i < M; i += 2)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      store(to + ((r + i) / 2 * N + j) * W, pair(x[i][j], i + 1 < M ? x[(i + 1) % M][j] : V{}));
}
#endif

// out[channel][lane] += sum over rows of tile[row][channel] x[row][lane]
template <class Op, int N, int P>
RW_INLINE void add_product(Tile tile, int r0, int width, int rows, const float *x, float *out) {
  sweep<Op, false, N>(
      tile.data + (ptrdiff_t)(r0 / Op::depth) * tile.ld, tile.ld, width, (rows + Op::depth - 1) / Op::depth, x,
      Nothing(),
      [&](auto, int r, auto &acc) __attribute__((always_inline)) { add_block<P>(out, r, acc); });
}

// Stores the block narrowed row by row, as the broadcast side of dS K. Single precision reads the copy of `keep`.
template <int M, int N>
RW_INLINE void keep_rows(float *, int, V (&)[M][N], Single) {}
#if defined(RW_PAIRS)
template <int M, int N>
RW_INLINE void keep_rows(float *to, int r, V (&x)[M][N], Pair) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store_narrow((char *)to + ((r + i) * N + j) * W * 2, x[i][j]);
}
#endif

// out[row][channel] += sum over keys of ds[row][key] keys[key][channel], for one panel of channels.
template <class Op, int N>
RW_INLINE void add_rows(const char *ds, ptrdiff_t ld, int rows, int depth, const float *keys, float *out) {
  sweep<Op, true, N>(
      ds, ld, rows, depth, keys,
      Nothing(),
      [&](auto, int r, auto &acc) __attribute__((always_inline)) { add_block<N>(out, r, acc); });
}

// Writes rows with channels across lanes, in panels of channels (padded to 16), as the streamed side of dS K.
template <class Op>
inline void pack_channels(Tile t, int n, int width, float *to) {
  const int elements = (n + Op::depth - 1) / Op::depth, padded = pad_lanes(width);
  for (int c = 0; c < padded; c += panel_width(c, padded)) {
    const int pw = panel_width(c, padded), filled = (int)smaller(pw, width - c);
    for (int r = 0; r < elements; ++r) {
      float *row = to + (ptrdiff_t)c * elements + (ptrdiff_t)r * pw;
      memcpy(row, t.data + r * t.ld + 4 * c, 4 * (size_t)filled);
      memset(row + filled, 0, 4 * (size_t)(pw - filled));
    }
  }
}

// A query tile of a column.
struct Streamed {
  Tile a, b, a_columns, b_columns;  // Q and dO by rows, and for contractions over rows
  TileMask mask;
  Ahead ahead;
  float *dq;  // the tile's sum, in panels of channels with q_tile rows each
  int rows, key_count;
};

inline void await(const int32_t *done, int32_t turn) {
  for (int spin = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) != turn; ++spin)
    if (spin > 200) sched_yield();
}

// Calls f(row, x) for the rows of a panel, two at a time except for a last single row.
template <int N, class F>
RW_INLINE void each_rows(const float *from, int n, F f) {
  auto some = [&](auto rows, int r) __attribute__((always_inline)) {
    constexpr int M = decltype(rows)::value;
    V x[M][N];
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) x[i][j] = load(from + ((r + i) * N + j) * W);
    f(r, x);
  };
  int r = 0;
  for (; r + 2 <= n; r += 2) some(Int<2>(), r);
  if (r < n) some(Int<1>(), r);
}

// Replaces a panel of products by P, in place. With pairs, also stores P after dropout as pairs.
template <class Op, int N>
RW_INLINE void weights(const Pairs &pairs, const BackwardMemory &m, int r0, int n, int lane, const TileMask &mask,
                       const Kept &kept) {
  pairs.apply(m.p, r0, n, lane, N * W);
  const float *low = m.low + r0;
  each_rows<N>(m.p, n, [&](int r, auto &x) __attribute__((always_inline)) {
    constexpr int M = sizeof x / sizeof x[0];
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        V e = exp2(min(V{}, (x[i][j] - splat(low[r + i])) * splat(kLog2e)));
        if (mask.rows) e = select(mask_at(mask.rows + (ptrdiff_t)(r0 + r + i) * mask.words, lane + j * W), e, V{});
        store(m.p + ((r + i) * N + j) * W, e);
        x[i][j] = kept(e, r + i, j);
      }
    if (Op::depth == 2) keep(m.p_pair, r, x, Op());
  });
}

// Processes a chunk of a query tile's rows for N vectors of a panel of P vectors of keys, from vector `part` on.
// Scored: the call has terms or dropout.
template <class Op, int N, int P, bool Scored, class Turn>
inline void backward_chunk(const Problem &pb, const BackwardMemory &m, float size, int panel, int part, Live live,
                           const Streamed &t, const Ahead &ahead, Turn wait, float *dk, float *dv, const Pairs &pairs) {
  const int r0 = live.first, n = live.count(), lane = panel + part * W;
  const float *x = m.x + (ptrdiff_t)panel * (pb.d / Op::depth) + part * W,
              *y = m.y + (ptrdiff_t)panel * (pb.dv_dim / Op::depth) + part * W;
  float *p = m.p, *p_pair = m.p_pair, *ds = m.ds, *ds_rows = m.ds_rows;
  const TileMask mask = t.mask;
  const V sizes = splat(size);
  const float *low = m.low + r0, *delta = m.delta + r0;
  sweep<Op, true, N, P>(
      t.a.data + r0 * t.a.ld, t.a.ld, n, pb.d / Op::depth, x,
      [&](auto block, int r) __attribute__((always_inline)) {
        ahead.fetch(r0 + r, r0 + r + decltype(block)::value);
      },
      [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
        constexpr int M = decltype(block)::value;
        const uint32_t *bits = mask.rows ? mask.rows + (ptrdiff_t)(r0 + r) * mask.words : nullptr;
        if constexpr (Scored) {
#pragma GCC unroll 16
          for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) store(p + ((r + i) * N + j) * W, acc[i][j] * sizes);
          return;
        }
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) {
            // The exponent is at most 0, except for rounding errors, which are unbounded if scores are.
            V e = exp2(min(V{}, (acc[i][j] * sizes - splat(low[r + i])) * splat(kLog2e)));
            if (bits) e = select(mask_at(bits + i * mask.words, lane + j * W), e, V{});
            acc[i][j] = e;
            store(p + ((r + i) * N + j) * W, e);
          }
        if (Op::depth == 2) keep(p_pair, r, acc, Op());
      });
  const TileMask &drop = pairs.kept;
  const Kept kept{drop.rows ? drop.rows + (ptrdiff_t)r0 * drop.words : nullptr, drop.words, lane};
  if constexpr (Scored) weights<Op, N>(pairs, m, r0, n, lane, mask, kept);
  const V kept_factor = splat(pb.score_terms.kept_factor());
  sweep<Op, true, N, P>(t.b.data + r0 * t.b.ld, t.b.ld, n, pb.dv_dim / Op::depth, y, Nothing(),
                     [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
                       constexpr int M = decltype(block)::value;
                       const uint32_t *bits = mask.rows ? mask.rows + (ptrdiff_t)(r0 + r) * mask.words : nullptr;
#pragma GCC unroll 16
                       for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
                         for (int j = 0; j < N; ++j) {
                           float *weight = p + ((r + i) * N + j) * W;
                           V e = load(weight), slope = acc[i][j];
                           if constexpr (Scored) {
                             store(weight, kept(e, r + i, j));  // dV uses the weights after dropout
                             slope = kept(slope * kept_factor, r + i, j);
                           }
                           e *= slope - splat(delta[r + i]);
                           if (bits) e = select(mask_at(bits + i * mask.words, lane + j * W), e, V{});
                           acc[i][j] = e;
                         }
                       if constexpr (Scored) {
                         keep(m.dt, r, acc, Single());
                       } else {
                         keep(ds, r, acc, Op());
                         keep_rows(ds_rows, r, acc, Op());
                       }
                     });
  if constexpr (Scored) {
    pairs.chain(m.dt, r0, n, lane, N * W);
    each_rows<N>(m.dt, n, [&](int r, auto &x) __attribute__((always_inline)) {
      keep(ds, r, x, Op());
      keep_rows(ds_rows, r, x, Op());
    });
  }
  add_product<Op, N, P>(t.b_columns, r0, pb.dv_dim, n, Op::depth == 2 ? p_pair : p,
                        dv + (ptrdiff_t)panel * pb.dv_dim + part * W);
  add_product<Op, N, P>(t.a_columns, r0, pb.d, n, ds, dk + (ptrdiff_t)panel * pb.d + part * W);

  wait();
  const char *rows = (const char *)(Op::depth == 2 ? ds_rows : ds);
  const ptrdiff_t ld = N * W * (Op::depth == 2 ? 2 : 4);
  const int all = (t.key_count + Op::depth - 1) / Op::depth,
            depth = (int)smaller(N * W / Op::depth, all - lane / Op::depth);
  const int width = pad_lanes(pb.d);
  for (int ch = 0; ch < width; ch += panel_width(ch, width)) {
    const int pw = panel_width(ch, width);
    const float *keys = m.keys + (ptrdiff_t)ch * all + (ptrdiff_t)(lane / Op::depth) * pw;
    float *out = t.dq + (ptrdiff_t)ch * pb.plan.q_tile + (ptrdiff_t)r0 * pw;
    if (kWide == 4 && pw == 4 * W)
      add_rows<Op, kWide>(rows, ld, n, depth, keys, out);
    else if (pw == 2 * W)
      add_rows<Op, 2>(rows, ld, n, depth, keys, out);
    else
      add_rows<Op, 1>(rows, ld, n, depth, keys, out);
  }
}

// Processes one query tile for one panel of keys. Like forward_panel, it skips masked rows at both ends, and may split
// the panel into halves.
template <class Op, int N, bool Scored>
inline void backward_panel(const Problem &pb, const BackwardMemory &m, float size, int lane, const Streamed &t,
                           const int32_t *done, int32_t turn, float *dk, float *dv, const Pairs &pairs) {
  bool waits = lane == 0;
  const auto wait = [&]() __attribute__((always_inline)) {
    if (!waits) return;
    waits = false;
    await(done, turn);
    if (turn == 0) memset(t.dq, 0, 4 * (size_t)pb.plan.q_tile * pad_lanes(pb.d));
  };
  const Ahead ahead = lane ? Ahead() : t.ahead;
  for (int r0 = 0; r0 < t.rows; r0 += kBackwardRows) {
    const int n = (int)smaller(kBackwardRows, t.rows - r0);
    const Live all = live_rows<Op>(t.mask, r0, n, lane, N * W);
    ahead.fetch(r0, all.first);
    ahead.fetch(all.last, r0 + n);
    if (all.count() == 0) continue;
    if constexpr (N * W > 32) {
      if (t.mask.rows) {
        constexpr int half = N / 2;
        const Live low = live_rows<Op>(t.mask, r0, n, lane, half * W);
        const Live high = live_rows<Op>(t.mask, r0, n, lane + half * W, half * W);
        if (apart(all, low, high)) {
          ahead.fetch(all.first, all.last);
          if (low.count())
            backward_chunk<Op, half, N, Scored>(pb, m, size, lane, 0, low, t, Ahead(), wait, dk, dv, pairs);
          if (high.count())
            backward_chunk<Op, half, N, Scored>(pb, m, size, lane, half, high, t, Ahead(), wait, dk, dv, pairs);
          continue;
        }
      }
    }
    backward_chunk<Op, N, N, Scored>(pb, m, size, lane, 0, all, t, ahead, wait, dk, dv, pairs);
  }
  wait();
}

}  // namespace
}  // namespace ringweave
