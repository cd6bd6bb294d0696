// Backward: a task owns a key tile (its dK and dV) with keys across lanes, and streams the query tiles of its column.
//
//     P = exp(scale S - lse)    dP = dO V^T    dS = P (dP - delta)
//     dQ = scale dS K           dK = scale dS^T Q        dV = P^T dO
//
// dQ belongs to no task: each query tile has a sum that the columns add to in turn, in the order in which they start. The wait costs
// little (columns in work at a time share few query tiles, or walk them one tile apart), the sums are bitwise the same on any number of
// threads, and S and dP are computed once.
#pragma once
#include <sched.h>

#include "forward.h"

namespace ringweave {
namespace {

constexpr int kBackwardRows = 64;  // rows of P and dS at a time

struct BackwardMemory {
  float *x, *y, *dx, *p, *p_pair, *ds, *ds_rows, *low, *delta, *keys, *clean_keys;  // x, y: K and V across lanes
  char *a, *b, *a_columns, *b_columns, *rows;
  uint32_t *mask;
  uint8_t *dead, *bad;
  size_t bytes;
  BackwardMemory(const Problem &pb, int lanes, char *block) {
    Carve m{block};
    const int width = (int)larger(pb.d, pb.dv_dim), q = pb.plan.q_tile, k = pb.plan.kv_tile, panel = kBackwardRows * kWide * W;
    x = m.take<float>((size_t)lanes * pb.d);
    y = m.take<float>((size_t)lanes * pb.dv_dim);
    dx = m.take<float>((size_t)lanes * (pb.d + pb.dv_dim));
    p = m.take<float>(panel), p_pair = m.take<float>(panel), ds = m.take<float>(panel), ds_rows = m.take<float>(panel);
    low = m.take<float>(larger(lanes, q));
    delta = m.take<float>(q);
    keys = m.take<float>((size_t)k * pad_lanes(pb.d));
    clean_keys = m.take<float>((size_t)k * pad_lanes(pb.d));
    a = m.take<char>((size_t)larger(q, k) * pb.d * 4);
    b = m.take<char>((size_t)q * pb.dv_dim * 4);
    a_columns = m.take<char>((size_t)q * pb.d * 4);
    b_columns = m.take<char>((size_t)q * pb.dv_dim * 4);
    rows = m.take<char>((size_t)width * 16);
    mask = m.take<uint32_t>((size_t)q * pb.plan.words);
    dead = m.take<uint8_t>(larger(q, k));
    bad = m.take<uint8_t>(k);
    bytes = (size_t)(m.at - block);
  }
};

// A block of M rows as the streamed side of a contraction over rows (pairs: rows 2i, 2i + 1 side by side).
template <int M, int N>
RW_INLINE void keep(float *to, int r, V (&x)[M][N], Single) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(to + ((r + i) * N + j) * W, x[i][j]);
}
#if defined(__AVX512BF16__)
template <int M, int N>
RW_INLINE void keep(float *to, int r, V (&x)[M][N], Pair) {
#pragma GCC unroll 16
  for (int i = 0; i < M; i += 2)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(to + ((r + i) / 2 * N + j) * W, pair(x[i][j], i + 1 < M ? x[(i + 1) % M][j] : V{}));
}
#endif

// out[channel][lane] += sum over rows of tile[row][channel] x[row][lane]
template <class Op, int N>
RW_INLINE void add_product(Tile tile, int r0, int width, int rows, const float *x, float *out) {
  sweep<Op, false, N>(
      tile.data + (ptrdiff_t)(r0 / Op::depth) * tile.ld, tile.ld, width, (rows + Op::depth - 1) / Op::depth, x,
      [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) acc[i][j] = load(out + ((r + i) * N + j) * W);
      },
      [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) store(out + ((r + i) * N + j) * W, acc[i][j]);
      });
}

// The same block narrowed row by row, as the broadcast side of dS K. Single precision reads `keep`'s copy.
template <int M, int N>
RW_INLINE void keep_rows(float *, int, V (&)[M][N], Single) {}
#if defined(__AVX512BF16__)
template <int M, int N>
RW_INLINE void keep_rows(float *to, int r, V (&x)[M][N], Pair) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      __m256bh h = _mm512_cvtneps_pbh((__m512)x[i][j]);
      memcpy((char *)to + ((r + i) * N + j) * W * 2, &h, 32);
    }
}
#endif

// out[row][channel] += sum over keys of ds[row][key] keys[key][channel], for one panel of channels.
template <class Op, int N>
RW_INLINE void add_rows(const char *ds, ptrdiff_t ld, int rows, int depth, const float *keys, float *out) {
  sweep<Op, true, N>(
      ds, ld, rows, depth, keys,
      [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) acc[i][j] = load(out + ((r + i) * N + j) * W);
      },
      [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) store(out + ((r + i) * N + j) * W, acc[i][j]);
      });
}

// Rows with channels across lanes, panel by panel of channels (padded to 16): the streamed side of dS K.
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

// One query tile of a column.
struct Streamed {
  Tile a, b, a_columns, b_columns;  // Q and dO by rows, and for contractions over rows
  const float *keys;                // K, channels across lanes
  TileMask mask;
  Ahead ahead;
  float *dq;  // the tile's sum: panels of channels, each q_tile rows
  int rows, key_count;
};

inline void await(const int32_t *done, int32_t turn) {
  for (int spin = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) != turn; ++spin)
    if (spin > 200) sched_yield();
}

// One query tile against one panel of keys.
template <class Op, int N>
inline void backward_panel(const Problem &pb, const BackwardMemory &m, float c, int lane, const Streamed &t, const int32_t *done,
                           int32_t turn, float *dk, float *dv) {
  const float *x = m.x + (ptrdiff_t)lane * (pb.d / Op::depth), *y = m.y + (ptrdiff_t)lane * (pb.dv_dim / Op::depth);
  float *p = m.p, *p_pair = m.p_pair, *ds = m.ds, *ds_rows = m.ds_rows;
  const TileMask mask = t.mask;
  const V cv = splat(c);
  for (int r0 = 0; r0 < t.rows; r0 += kBackwardRows) {
    const int n = (int)smaller(kBackwardRows, t.rows - r0);
    const float *low = m.low + r0, *delta = m.delta + r0;
    auto zero = [](auto, int, auto &acc) __attribute__((always_inline)) { clear(acc); };
    sweep<Op, true, N>(t.a.data + r0 * t.a.ld, t.a.ld, n, pb.d / Op::depth, x,
                       [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
                         if (lane == 0) t.ahead.fetch(r0 + r, r0 + r + decltype(block)::value);
                         clear(acc);
                       },
                       [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
                         constexpr int M = decltype(block)::value;
                         const uint32_t *bits = mask.rows ? mask.rows + (ptrdiff_t)(r0 + r) * mask.words : nullptr;
#pragma GCC unroll 16
                         for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
                           for (int j = 0; j < N; ++j) {
                             V e = exp2(acc[i][j] * cv - splat(low[r + i]));
                             if (bits) e = select(mask_at(bits + i * mask.words, lane + j * W), e, V{});
                             acc[i][j] = e;
                             store(p + ((r + i) * N + j) * W, e);
                           }
                         if (Op::depth == 2) keep(p_pair, r, acc, Op());
                       });
    sweep<Op, true, N>(t.b.data + r0 * t.b.ld, t.b.ld, n, pb.dv_dim / Op::depth, y, zero,
                       [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
                         constexpr int M = decltype(block)::value;
                         const uint32_t *bits = mask.rows ? mask.rows + (ptrdiff_t)(r0 + r) * mask.words : nullptr;
#pragma GCC unroll 16
                         for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
                           for (int j = 0; j < N; ++j) {
                             V e = load(p + ((r + i) * N + j) * W) * (acc[i][j] - splat(delta[r + i]));
                             if (bits) e = select(mask_at(bits + i * mask.words, lane + j * W), e, V{});
                             acc[i][j] = e;
                           }
                         keep(ds, r, acc, Op());
                         keep_rows(ds_rows, r, acc, Op());
                       });
    add_product<Op, N>(t.b_columns, r0, pb.dv_dim, n, Op::depth == 2 ? p_pair : p, dv + (ptrdiff_t)lane * pb.dv_dim);
    add_product<Op, N>(t.a_columns, r0, pb.d, n, ds, dk + (ptrdiff_t)lane * pb.d);

    if (lane == 0 && r0 == 0) {
      await(done, turn);
      if (turn == 0) memset(t.dq, 0, 4 * (size_t)pb.plan.q_tile * pad_lanes(pb.d));
    }
    const char *rows = (const char *)(Op::depth == 2 ? ds_rows : ds);
    const ptrdiff_t ld = N * W * (Op::depth == 2 ? 2 : 4);
    const int all = (t.key_count + Op::depth - 1) / Op::depth, depth = (int)smaller(N * W / Op::depth, all - lane / Op::depth);
    const int width = pad_lanes(pb.d);
    for (int ch = 0; ch < width; ch += panel_width(ch, width)) {
      const int pw = panel_width(ch, width);
      const float *keys = t.keys + (ptrdiff_t)ch * all + (ptrdiff_t)(lane / Op::depth) * pw;
      float *out = t.dq + (ptrdiff_t)ch * pb.plan.q_tile + (ptrdiff_t)r0 * pw;
      if (kWide == 4 && pw == 4 * W)
        add_rows<Op, kWide>(rows, ld, n, depth, keys, out);
      else if (pw == 2 * W)
        add_rows<Op, 2>(rows, ld, n, depth, keys, out);
      else
        add_rows<Op, 1>(rows, ld, n, depth, keys, out);
    }
  }
}

// lse times log2(e), so that P = exp2(c s - low); +inf where the row attends nothing, so that P = 0.
inline void lows(float *lse, int n) {
  for (int i = 0; i < n; ++i) lse[i] = lse[i] == -kInf ? kInf : lse[i] * kLog2e;
}

inline void write_query_tile(const Problem &pb, int64_t b, int64_t h, int64_t first, int n, const float *dq, char *memory) {
  const int width = pad_lanes(pb.d);
  float *row = (float *)memory;
  for (int r = 0; r < n; ++r) {
    for (int ch = 0; ch < pb.d; ch += panel_width(ch, width)) {
      const int pw = panel_width(ch, width), filled = (int)smaller(pw, pb.d - ch);
      const float *from = dq + (ptrdiff_t)ch * pb.plan.q_tile + (ptrdiff_t)r * pw;
      for (int i = 0; i < filled; ++i) row[ch + i] = from[i] * pb.scale;
    }
    narrow(row_at(pb.dq, b, h, first + r), row, pb.dq.dtype, pb.d);
  }
}

inline Lanes key_lanes(const Problem &pb, const Unit &u, int tile) {
  const int64_t first = (int64_t)tile * pb.plan.kv_tile;
  const int rows = (int)smaller(pb.plan.kv_tile, pb.nk - first);
  return {u.batch, u.kv_head, first, 1, rows, pad_lanes(rows)};
}

inline void write_scaled(const View &t, const Lanes &lanes, int width, const float *from, float factor, float *factors, char *memory) {
  for (int i = 0; i < lanes.count; ++i) factors[i] = factor;
  unpack(t, lanes, width, from, factors, memory);
}

inline void write_keys(const Problem &pb, const Lanes &lanes, const float *dk, const BackwardMemory &m) {
  write_scaled(pb.dk, lanes, pb.d, dk, pb.scale, m.low, m.rows);
  write_scaled(pb.dv, lanes, pb.dv_dim, dk + (size_t)lanes.count * pb.d, 1, m.low, m.rows);
}

// Marks the rows that hold a NaN or an infinity; whether any does.
inline bool find_bad(const View &t, const Lanes &lanes, int width, uint8_t *bad, char *memory) {
  bool any = false;
  for (int r = 0; r < lanes.rows; ++r) {
    widen((float *)memory, row_at(t, lanes.batch, lanes.head, lanes.first + r), t.dtype, width);
    float sum = 0;
    for (int c = 0; c < width; ++c) sum += ((float *)memory)[c] * 0.f;
    bad[r] = sum != 0;
    any |= bad[r];
  }
  return any;
}

// The mask of an entry of a column: rows are queries already. A pair of keys that straddles the end needs its bit.
template <class Op>
inline TileMask column_mask(const Problem &pb, int32_t bits, int rows, int keys, const BackwardMemory &m) {
  const Plan &plan = pb.plan;
  if (bits >= 0) {
    const uint32_t *at = (const uint32_t *)plan.masks + (ptrdiff_t)bits * plan.q_tile * plan.words;
    return {at, plan.words, find_dead(at, rows, plan.words, m.dead)};
  }
  if (keys % Op::depth == 0) return {};
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < plan.words; ++w)
      m.mask[r * plan.words + w] = 32 * w + 32 <= keys ? ~0u : 32 * w < keys ? (1u << (keys & 31)) - 1 : 0;
  return {m.mask, plan.words, nullptr};
}

// K for dS K without the broken keys that no query of the tile may attend: 0 * NaN must not reach a query.
template <class Op>
inline const float *usable_keys(const Problem &pb, const Lanes &lanes, const TileMask &mask, const BackwardMemory &m) {
  uint8_t drop[256];
  bool any = false;
  for (int k = 0; k < lanes.rows; ++k) {
    uint32_t seen = 0;
    for (int r = 0; r < pb.plan.q_tile; ++r) seen |= mask.rows[(ptrdiff_t)r * mask.words + k / 32];
    drop[k] = m.bad[k] && !(seen >> (k & 31) & 1);
    any |= drop[k];
  }
  if (!any) return m.keys;
  pack_channels<Op>(tile_columns<Op>(pb.k, lanes.batch, lanes.head, lanes.first, lanes.rows, pb.d, drop, m.a), lanes.rows, pb.d, m.clean_keys);
  return m.clean_keys;
}

// The list of a column is that of each query head of the K/V head, one after the other.
template <class Op>
inline void backward_piece(const Problem &pb, const Unit &u, const Piece &piece, const Turns &turns, char *block, float *partial) {
  const Plan &plan = pb.plan;
  const Lanes lanes = key_lanes(pb, u, piece.tile);
  const BackwardMemory m(pb, lanes.count, block);
  const Scale scale(pb.scale);
  float *dk = partial ? partial : m.dx, *dv = dk + (size_t)lanes.count * pb.d;
  memset(dk, 0, 4 * (size_t)lanes.count * (pb.d + pb.dv_dim));
  bool any_bad = false;
  if (piece.begin < piece.end) {
    pack<Op>(pb.k, lanes, pb.d, scale.sign, m.x, m.rows);
    pack<Op>(pb.v, lanes, pb.dv_dim, 1, m.y, m.rows);
    pack_channels<Op>(tile_columns<Op>(pb.k, u.batch, u.kv_head, lanes.first, lanes.rows, pb.d, nullptr, m.a), lanes.rows, pb.d, m.keys);
    any_bad = find_bad(pb.k, lanes, pb.d, m.bad, m.rows);
  }
  int64_t before = 0;  // entries of the heads already passed
  for (int h = u.head; h < u.head + u.heads; ++h) {
    const int64_t g = plan.group[u.batch * pb.q_heads + h];
    const int32_t *ends = plan.col_ptr + g * (plan.k_tiles + 1) + piece.tile;
    const int64_t count = ends[1] - ends[0];
    const int64_t from = larger(piece.begin - before, 0), to = smaller(piece.end - before, count);
    before += count;
    for (int64_t e = ends[0] + from; e < ends[0] + to; ++e) {
      const int64_t i = plan.row[e], first = i * plan.q_tile;
      const int rows = (int)smaller(plan.q_tile, pb.nq - first);
      const Lanes queries{u.batch, h, first, 1, rows, rows};
      Streamed t;
      t.rows = rows, t.key_count = lanes.rows;
      t.mask = column_mask<Op>(pb, plan.bits_t[e], rows, lanes.rows, m);
      t.keys = any_bad && plan.bits_t[e] >= 0 ? usable_keys<Op>(pb, lanes, t.mask, m) : m.keys;
      if (e + 1 < ends[0] + to) {
        const int64_t then = (int64_t)plan.row[e + 1] * plan.q_tile;
        t.ahead = Ahead(pb.q, pb.dout, u.batch, h, then, (int)smaller(plan.q_tile, pb.nq - then), pb.d, pb.dv_dim);
      }
      gather(pb.lse, queries, -kInf, m.low);
      lows(m.low, rows);
      gather(pb.delta, queries, 0, m.delta);
      Dead dead = t.mask.dead;
      t.a = tile_rows<Op>(pb.q, u.batch, h, first, rows, pb.d, dead, m.a);
      t.b = tile_rows<Op>(pb.dout, u.batch, h, first, rows, pb.dv_dim, dead, m.b);
      t.a_columns = Op::depth == 1 ? t.a : tile_columns<Op>(pb.q, u.batch, h, first, rows, pb.d, dead, m.a_columns);
      t.b_columns = Op::depth == 1 ? t.b : tile_columns<Op>(pb.dout, u.batch, h, first, rows, pb.dv_dim, dead, m.b_columns);
      const int64_t at = ((int64_t)(piece.unit - turns.unit) * u.heads + (h - u.head)) * plan.q_tiles + i;
      t.dq = turns.sums + at * plan.q_tile * pad_lanes(pb.d);
      int32_t *done = turns.done + at;
      const int32_t turn = turns.rank[e];
      for (int lane = 0; lane < lanes.count; lane += panel_width(lane, lanes.count)) {
        const int n = panel_width(lane, lanes.count) / W;
        if (kWide == 4 && n == 4)
          backward_panel<Op, kWide>(pb, m, scale.c, lane, t, done, turn, dk, dv);
        else if (n == 2)
          backward_panel<Op, 2>(pb, m, scale.c, lane, t, done, turn, dk, dv);
        else
          backward_panel<Op, 1>(pb, m, scale.c, lane, t, done, turn, dk, dv);
      }
      if (turn + 1 == turns.total[g * plan.q_tiles + i]) write_query_tile(pb, u.batch, h, first, rows, t.dq, m.rows);
      __atomic_store_n(done, turn + 1, __ATOMIC_RELEASE);
    }
  }
  if (!partial) write_keys(pb, lanes, dk, m);
}

inline void backward_join(const Problem &pb, const Unit &u, const Join &join, char *block, const float *partials, size_t stride) {
  const Lanes lanes = key_lanes(pb, u, join.tile);
  const BackwardMemory m(pb, lanes.count, block);
  const size_t n = (size_t)lanes.count * (pb.d + pb.dv_dim);
  memset(m.dx, 0, 4 * n);
  for (int i = 0; i < join.slots; ++i) {
    const float *from = partials + (size_t)(join.slot + i) * stride;
    for (size_t j = 0; j < n; ++j) m.dx[j] += from[j];
  }
  write_keys(pb, lanes, m.dx, m);
}

}  // namespace
}  // namespace ringweave
