// Backward of packed keys: the rows of a tile are the heads that share the list of one query, and every row attends
// every key of the list.
//
// It runs in windows of queries, each in two phases. First a task computes a query, with its heads across lanes: dQ, and
// P and dS, which it keeps. Then a task computes a range of keys: it walks the queries of the window, and adds P^T dO and
// dS^T Q of each to the sums of the listed keys in the range, with channels across lanes. A query's keys are summed in
// ascending order, kPanelRows at a time, and a key's queries in ascending order, all heads of a query at a time and
// kSegment queries from 0. So no bit depends on windows, ranges or threads, and dQ of a query depends on no other query.
#pragma once
#include "backward.h"

namespace ringweave {
namespace {

// What a task of the first phase keeps of a query for the second.
struct KeptQuery {
  char *weights, *slopes;  // P and dS: a row for each key, with the heads as elements of Op
  float *q, *dout;         // Q and dO with channels across lanes (see pack_channels)
  int32_t *finite;         // whether the deltas are; otherwise dO has 0 for elements that are not finite
  // Not a Carve, which fills guarded memory anew: the second phase reads what the first has written.
  KeptQuery(const Problem &pb, int most, char *block) : weights(block), slopes(block + list_bytes(pb, most)) {
    q = (float *)(void *)(slopes + list_bytes(pb, most));
    dout = q + (size_t)pad_lanes(pb.plan.q_tile) * pad_lanes(pb.d);
    finite = (int32_t *)(void *)(dout + (size_t)pad_lanes(pb.plan.q_tile) * pad_lanes(pb.dv_dim));
  }
  static size_t list_bytes(const Problem &pb, int most) { return 4 * (size_t)most * pad_lanes(pb.plan.q_tile); }
  static size_t bytes(const Problem &pb, int most) {
    const size_t channels = (size_t)pad_lanes(pb.d) + pad_lanes(pb.dv_dim);
    return 2 * list_bytes(pb, most) + 4 * pad_lanes(pb.plan.q_tile) * channels + sizeof(int32_t);
  }
};

struct ListMemory {
  float *x, *y, *dq, *p, *ds, *dt;  // x, y: Q and dO across lanes; dt: gradient of the scores after the terms
  PerLane<float> low, delta;
  char *k, *v, *k_columns, *columns, *rows;
  uint8_t *broken, *bad;
  TermMemory terms;
  size_t bytes;
  ListMemory(const Problem &pb, char *block) {
    Carve m{block};
    const int lanes = pad_lanes(pb.plan.q_tile), width = (int)larger(pb.d, pb.dv_dim);
    const size_t panel = (size_t)kPanelRows * kWide * W;
    x = m.take<float>((size_t)lanes * pb.d), y = m.take<float>((size_t)lanes * pb.dv_dim);
    dq = m.take<float>((size_t)lanes * pb.d);
    p = m.take<float>(panel), ds = m.take<float>(panel), dt = m.take<float>(pb.score_terms.any() ? panel : 0);
    low = {m, (size_t)lanes}, delta = {m, (size_t)lanes};
    k = m.take<char>((size_t)kPanelRows * pb.d * 4), v = m.take<char>((size_t)kPanelRows * pb.dv_dim * 4);
    k_columns = m.take<char>((size_t)kPanelRows * pb.d * 4);
    columns = m.take<char>((size_t)lanes * width * 4);
    rows = m.take<char>((size_t)width * 4 * W);
    broken = m.take<uint8_t>(lanes), bad = m.take<uint8_t>(kPanelRows);
    terms = TermMemory(pb, m, lanes, true);
    bytes = (size_t)(m.at - block);
  }
};

// Stores a block row by row as elements of Op, rows ld bytes apart.
template <class Op, int M, int N>
RW_INLINE void keep_lanes(char *to, ptrdiff_t ld, int r, V (&x)[M][N]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
#if defined(RW_PAIRS)
      if constexpr (Op::depth == 2) {
        store_narrow(to + (r + i) * ld + j * W * 2, x[i][j]);
        continue;
      }
#endif
      store(to + (r + i) * ld + j * W * 4, x[i][j]);
    }
}

template <class Op>
RW_INLINE ptrdiff_t kept_row(const Problem &pb) {
  return (ptrdiff_t)pad_lanes(pb.plan.q_tile) * (Op::depth == 2 ? 2 : 4);
}

// A panel of a query's listed keys: by rows, and for contractions over keys.
struct ListedKeys {
  Tile k, v, k_columns;
  int n;
};

// Computes P, dS and dQ of a panel of keys for N vectors of heads. Scored: the call has terms.
template <class Op, int N, bool Scored>
inline void list_panel(const Problem &pb, const ListMemory &m, float size, int lane, const ListedKeys &keys,
                       char *kept_weights, char *kept_slopes, const Pairs &pairs) {
  const float *x = m.x + (ptrdiff_t)lane * (pb.d / Op::depth), *y = m.y + (ptrdiff_t)lane * (pb.dv_dim / Op::depth);
  const ptrdiff_t ld = kept_row<Op>(pb), at = lane * (Op::depth == 2 ? 2 : 4);
  kept_weights += at, kept_slopes += at;
  float *p = m.p, *ds = m.ds;
  V low[N], delta[N];
  Mask attends[N];  // a row without keys has gradients of 0, whatever its Q and dO are
  for (int j = 0; j < N; ++j) {
    low[j] = load(m.low + lane + j * W), delta[j] = load(m.delta + lane + j * W);
    uint32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= (uint32_t)(low[j][i] != kInf) << i;
    attends[j] = mask_of(bits);
  }
  const V sizes = splat(size);
  const auto weigh = [&](int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (size_t i = 0; i < sizeof acc / sizeof acc[0]; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        // as in backward_chunk
        const V e = exp2(min(V{}, (acc[i][j] - low[j]) * splat(kLog2e)));
        acc[i][j] = select(attends[j], e, V{});
        store(p + ((r + i) * N + j) * W, acc[i][j]);
      }
    keep_lanes<Op>(kept_weights, ld, r, acc);
  };
  sweep<Op, true, N>(keys.k.data, keys.k.ld, keys.n, pb.d / Op::depth, x, Nothing(),
                     [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
                       for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
                         for (int j = 0; j < N; ++j) {
                           acc[i][j] *= sizes;
                           if (Scored) store(p + ((r + i) * N + j) * W, acc[i][j]);
                         }
                       if (!Scored) weigh(r, acc);
                     });
  if constexpr (Scored) {
    pairs.apply(p, 0, keys.n, lane, N * W);
    each_rows<N>(p, keys.n, weigh);
  }
  sweep<Op, true, N>(keys.v.data, keys.v.ld, keys.n, pb.dv_dim / Op::depth, y, Nothing(),
                     [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
                       for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
                         for (int j = 0; j < N; ++j) {
                           const V e = load(p + ((r + i) * N + j) * W);
                           acc[i][j] = select(attends[j], e * (acc[i][j] - delta[j]), V{});
                         }
                       if constexpr (Scored) {
                         keep(m.dt, r, acc, Single());
                       } else {
                         keep(ds, r, acc, Op());
                         keep_lanes<Op>(kept_slopes, ld, r, acc);
                       }
                     });
  if constexpr (Scored) {
    pairs.chain(m.dt, 0, keys.n, lane, N * W);
    each_rows<N>(m.dt, keys.n, [&](int r, auto &acc) __attribute__((always_inline)) {
      keep(ds, r, acc, Op());
      keep_lanes<Op>(kept_slopes, ld, r, acc);
    });
  }
  float *dq = m.dq + (ptrdiff_t)lane * pb.d;
  sweep<Op, false, N>(keys.k_columns.data, keys.k_columns.ld, pb.d, (keys.n + Op::depth - 1) / Op::depth, ds, Nothing(),
                      [&](auto, int r, auto &acc) __attribute__((always_inline)) { add_block<N>(dq, r, acc); });
}

// Computes dQ of a query, and keeps P and dS of its keys.
template <class Op, bool Scored>
inline void backward_query(const Problem &pb, const Unit &u, int64_t tile, const ListSums &sums, char *block, char *to) {
  const Lanes lanes = query_lanes(pb, u, (int)tile);
  const Listed list = listed(pb, u, tile);
  const ListMemory m(pb, block);
  const KeptQuery kept(pb, sums.most, to);
  const Scale scale(pb);
  gather(pb.lse, lanes, -kInf, m.low);
  gather(pb.delta, lanes, 0, m.delta);
  const Dead broken = broken_rows(m.low, lanes.rows, nullptr, m.broken);
  lows(m.low, lanes.count);
  pack<Op>(pb.q, lanes, pb.d, scale.packed, m.x, m.rows);
  pack<Op>(pb.dout, lanes, pb.dv_dim, 1, m.y, m.rows);
  memset(m.dq, 0, 4 * (size_t)lanes.count * pb.d);
  const View q = of_tile(pb.q, tile), dout = of_tile(pb.dout, tile);
  pack_channels<Op>(tile_columns<Op>(q, u.batch, u.head, lanes.first, lanes.rows, pb.d, broken, m.columns), lanes.rows,
                    pb.d, kept.q);
  *kept.finite = finite_deltas(m.delta, lanes.rows);
  Dead copied = broken;  // broken_rows has set all of m.broken to 0 if it returns null
  if (!*kept.finite) copied = m.broken;
  const Tile columns =
      tile_columns<Op>(dout, u.batch, u.head, lanes.first, lanes.rows, pb.dv_dim, copied, m.columns);
  if (!*kept.finite) keep_finite(m.columns, column_elements<Op>(lanes.rows, pb.dv_dim), Op());
  pack_channels<Op>(columns, lanes.rows, pb.dv_dim, kept.dout);

  const float size = scale.before * scale.size;
  const Pairs pairs(pb, m.terms, u.batch, false);
  // values that are the first channels of the keys, as in latent attention, are not copied again
  const bool same = begins_with(pb.k, pb.d, pb.v, pb.dv_dim);
  for (int first = 0; first < list.count; first += kPanelRows) {
    const int64_t start = list.first + first;
    ListedKeys keys;
    keys.n = (int)smaller(kPanelRows, list.count - first);
    keys.k = tile_rows<Op>(pb.k, u.batch, u.kv_head, start, keys.n, pb.d, nullptr, m.k);
    keys.v = same ? keys.k : tile_rows<Op>(pb.v, u.batch, u.kv_head, start, keys.n, pb.dv_dim, nullptr, m.v);
    bool some = false;
    for (int i = 0; i < keys.n; ++i) some |= m.bad[i] = sums.bad[pb.k.chosen[start + i]];
    // the product dS K uses 0 for keys that are not finite (see backward_piece)
    keys.k_columns = keys.k;
    if (Op::depth == 2 || some)
      keys.k_columns =
          tile_columns<Op>(pb.k, u.batch, u.kv_head, start, keys.n, pb.d, some ? m.bad : nullptr, m.k_columns);
    char *weights = kept.weights + first * kept_row<Op>(pb), *slopes = kept.slopes + first * kept_row<Op>(pb);
    for (int lane = 0; lane < lanes.count; lane += panel_width(lane, lanes.count)) {
      const int n = panel_width(lane, lanes.count) / W;
      if (kWide == 4 && n == 4)
        list_panel<Op, kWide, Scored>(pb, m, size, lane, keys, weights, slopes, pairs);
      else if (n == 2)
        list_panel<Op, 2, Scored>(pb, m, size, lane, keys, weights, slopes, pairs);
      else
        list_panel<Op, 1, Scored>(pb, m, size, lane, keys, weights, slopes, pairs);
    }
  }
  m.low.fill(lanes.count, [&](int) { return pb.scale; });
  unpack(pb.dq, lanes, pb.d, m.dq, m.low, m.rows);
}

// sums[key][channel] += sum over heads of rows[n][head] columns[head][channel], for n keys.
template <class Op>
inline void add_listed(const char *rows, ptrdiff_t ld, const int32_t *keys, int n, int heads, const float *columns,
                       int width, float *sums) {
  const int depth = (heads + Op::depth - 1) / Op::depth, padded = pad_lanes(width);
  const auto add = [&](auto vectors, int c) __attribute__((always_inline)) {
    constexpr int N = decltype(vectors)::value;
    float *to = sums + c;
    sweep<Op, true, N>(rows, ld, n, depth, columns + (ptrdiff_t)c * depth, Nothing(),
                       [&](auto, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
                         for (size_t i = 0; i < sizeof acc / sizeof acc[0]; ++i) {
                           float *row = to + (ptrdiff_t)keys[r + i] * padded;
#pragma GCC unroll 8
                           for (int j = 0; j < N; ++j) store(row + j * W, load(row + j * W) + acc[i][j]);
                         }
                       });
  };
  for (int c = 0; c < padded; c += panel_width(c, padded)) {
    const int pw = panel_width(c, padded);
    if (kWide == 4 && pw == 4 * W)
      add(Int<kWide>(), c);
    else if (pw == 2 * W)
      add(Int<2>(), c);
    else
      add(Int<1>(), c);
  }
}

constexpr int kListedRows = 48;  // keys added together; the cache holds their sums

// Adds what the queries of a window keep to the sums of the keys [from, to).
template <class Op>
inline void backward_range(const Problem &pb, const Unit &u, const ListSums &sums, int64_t first, int64_t last,
                           char *kept, size_t stride, int64_t from, int64_t to) {
  const ptrdiff_t ld = kept_row<Op>(pb);
  for (int64_t tile = first; tile < last; ++tile, kept += stride) {
    const Listed list = listed(pb, u, tile);
    const int32_t *chosen = pb.k.chosen + list.first;
    const int begin = list.before(pb, from), end = list.before(pb, to);
    const KeptQuery query(pb, sums.most, kept);
    const Lanes lanes = query_lanes(pb, u, (int)tile);
    for (int i = begin; i < end; i += kListedRows) {
      const int n = (int)smaller(kListedRows, end - i);
      add_listed<Op>(query.weights + i * ld, ld, chosen + i, n, lanes.rows, query.dout, pb.dv_dim, sums.values);
      add_listed<Op>(query.slopes + i * ld, ld, chosen + i, n, lanes.rows, query.q, pb.d, sums.keys);
    }
    if (begin == end || *query.finite) continue;
    // the elements of dO that are not finite, which the product has taken as 0
    for (int r = 0; r < lanes.rows; ++r) {
      const float lse = load1(lane_row(pb.lse, lanes, r));
      if (!(lse > -kInf && lse < kInf)) continue;
      float x[kMostChannels];
      widen(x, lane_row(pb.dout, lanes, r), pb.dout.dtype, pb.dv_dim);
      for (int c = 0; c < pb.dv_dim; ++c)
        for (int i = begin; !(fabsf(x[c]) < kInf) && i < end; ++i)
          sums.values[(ptrdiff_t)chosen[i] * pad_lanes(pb.dv_dim) + c] += x[c];
    }
  }
}

// Sets the sums of the keys [from, to) to 0, and finds keys that are not finite.
inline void begin_sums(const Problem &pb, const Unit &u, const ListSums &sums, int64_t from, int64_t to) {
  float x[kMostChannels];
  for (int64_t n = from; n < to; ++n) {
    widen(x, row_at(pb.k, u.batch, u.kv_head, n), pb.k.dtype, pb.d);
    sums.bad[n] = !all_finite(x, pb.d);
  }
  const int64_t d = pad_lanes(pb.d), dv = pad_lanes(pb.dv_dim);
  memset(sums.keys + from * d, 0, 4 * (size_t)((to - from) * d));
  memset(sums.values + from * dv, 0, 4 * (size_t)((to - from) * dv));
}

// Writes dK and dV of the keys [from, to).
inline void end_sums(const Problem &pb, const Unit &u, const ListSums &sums, int64_t from, int64_t to) {
  float x[kMostChannels];
  for (int64_t n = from; n < to; ++n) {
    const float *of_key = sums.keys + n * pad_lanes(pb.d);
    for (int c = 0; c < pb.d; ++c) x[c] = of_key[c] * pb.scale;
    narrow(row_at(pb.dk, u.batch, u.kv_head, n), x, pb.dk.dtype, pb.d);
    narrow(row_at(pb.dv, u.batch, u.kv_head, n), sums.values + n * pad_lanes(pb.dv_dim), pb.dv.dtype, pb.dv_dim);
  }
}

}  // namespace
}  // namespace ringweave
