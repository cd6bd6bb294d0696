// Backward: a task computes dK and dV of a key tile, with keys across lanes, and streams the query tiles of its column.
//
//     P = exp(scale S - lse)    dP = dO V^T    dS = P (dP - delta)
//     dQ = scale dS K           dK = scale dS^T Q        dV = P^T dO
//
// dQ belongs to no single task: each query tile has a sum, to which the columns add in turn, in the order in which they
// start. Waiting costs little, since columns that are processed together share few query tiles, or walk them one tile
// apart. In return, the sums are bitwise the same on any number of threads, and S and dP are computed only once.
#pragma once
#include "backward_keys.h"

namespace ringweave {
namespace {

// Converts lse to the number that is subtracted from scores: +inf for rows that attend nothing, so that P = 0, and NaN
// for rows with a score of +inf, as the rule for infinite scores requires.
inline void lows(float *lse, int n) {
  for (int i = 0; i < n; ++i) lse[i] = lse[i] == -kInf ? kInf : lse[i] == kInf ? kNan : lse[i];
}

// Marks the rows of Q and dO that must not reach any key: rows that attend nothing, and rows of NaN. The latter have
// P = NaN where they attend, and would add 0 * NaN elsewhere.
inline Dead broken_rows(const float *lse, int n, Dead dead, uint8_t *to) {
  bool some = false;
  for (int i = 0; i < n; ++i) {
    const bool alive = lse[i] > -kInf && lse[i] < kInf, known = dead && dead[i];
    to[i] = !alive || known;
    some |= !alive && !known;
  }
  return some ? to : dead;
}

inline void write_query_tile(const Problem &pb, const Lanes &queries, const float *dq, char *memory) {
  const View to = of_tile(pb.dq, queries.tile);
  const int width = pad_lanes(pb.d);
  float *row = (float *)memory;
  for (int r = 0; r < queries.rows; ++r) {
    for (int ch = 0; ch < pb.d; ch += panel_width(ch, width)) {
      const int pw = panel_width(ch, width), filled = (int)smaller(pw, pb.d - ch);
      const float *from = dq + (ptrdiff_t)ch * pb.plan.q_tile + (ptrdiff_t)r * pw;
      for (int i = 0; i < filled; ++i) row[ch + i] = from[i] * pb.scale;
    }
    narrow(row_at(to, queries.batch, queries.head, queries.first + r), row, to.dtype, pb.d);
  }
}

// Marks the rows that contain a NaN or an infinity; returns whether there are any.
inline bool find_bad(const View &t, const Lanes &lanes, int width, uint8_t *bad, char *memory) {
  bool any = false;
  for (int r = 0; r < lanes.rows; ++r) {
    widen((float *)memory, row_at(t, lanes.batch, lanes.head, lanes.first + r), t.dtype, width);
    bad[r] = !all_finite((float *)memory, width);
    any |= bad[r];
  }
  return any;
}

// Whether the deltas of a tile's rows are finite. If they are, dO is finite too. Otherwise P^T dO may multiply NaN with
// the weight 0 of a key that the row does not attend.
inline bool finite_deltas(const float *delta, int n) {
  V sums = V{};  // 0, or NaN
  for (int i = 0; i < n; i += W) sums = fused(load(delta + i), V{}, sums);
  return !any_below((V)((I)(sums != sums) & (I)splat(-1)), 0);
}

// Adds the elements of dO that are not finite, which the product has taken as 0, to dV of the keys that their rows
// attend.
inline void add_broken_gradients(const Problem &pb, const Lanes &queries, Live live, Dead dead, const TileMask &mask,
                                 const Lanes &keys, float *dv, char *memory) {
  for (int r = live.first; r < live.last; ++r) {
    if (dead && dead[r - live.first]) continue;
    widen((float *)memory, lane_row(pb.dout, queries, r), pb.dout.dtype, pb.dv_dim);
    add_broken((float *)memory, pb.dv_dim, mask, r, keys.rows, keys.count, dv);
  }
}

// The bits of word w of a mask of all keys.
inline uint32_t all_keys(int w, int keys) {
  return 32 * w + 32 <= keys ? ~0u : 32 * w < keys ? (1u << (keys & 31)) - 1 : 0;
}

// The mask of an entry of a column. It has a row per query, so it needs no transposition. A full tile with an odd
// number of keys needs a mask too, if products use pairs of keys.
template <class Op>
inline TileMask column_mask(const Problem &pb, int32_t mask_id, int rows, int keys, const BackwardMemory &m) {
  const Plan &plan = pb.plan;
  if (mask_id >= 0) {
    const uint32_t *at = (const uint32_t *)plan.mask_words + (ptrdiff_t)mask_id * plan.q_tile * plan.words;
    return {at, plan.words, find_dead(at, rows, plan.words, m.dead)};
  }
  if (keys % Op::depth == 0) return {};
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < plan.words; ++w) m.mask[r * plan.words + w] = all_keys(w, keys);
  return {m.mask, plan.words, nullptr};
}

// Takes the rows with scores of -inf alone out of a mask. They attend nothing, whatever Q and dO are.
inline TileMask without_empty(const TileMask &mask, const float *lse, int rows, int keys, int words,
                              const BackwardMemory &m) {
  bool any = false;
  for (int r = 0; r < rows; ++r) any |= lse[r] == -kInf && !(mask.dead && mask.dead[r]);
  if (!any) return mask;
  if (mask.rows) words = mask.words;
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < words; ++w) {
      const int at = r * words + w;
      m.mask[at] = lse[r] == -kInf ? 0 : mask.rows ? mask.rows[at] : all_keys(w, keys);
    }
  return {m.mask, words, find_dead(m.mask, rows, words, m.dead)};
}

// Processes one piece of a column. Its list is the concatenation of the entries in the window over the query heads of
// the K/V head.
template <class Op, bool Scored>
inline void backward_piece(const Problem &pb, const Unit &u, const Piece &piece, const Turns &turns, char *block,
                           float *partial) {
  const Plan &plan = pb.plan;
  const Lanes lanes = key_lanes(pb, u, piece.tile);
  const BackwardMemory m(pb, lanes.count, block);
  const Scale scale(pb);
  const float size = scale.before * scale.size;
  Pairs pairs(pb, m.terms, u.batch, true);
  if (Scored) pairs.set_lanes(lanes.first, lanes.rows, lanes.count);
  BackwardMemory of_few = m;
  of_few.x = m.few_x, of_few.y = m.few_y, of_few.dx = m.few_dx, of_few.keys = m.few_keys;
  Places places;
  Dead bad = nullptr;
  float *dk = partial ? partial : m.dx, *dv = dk + (size_t)lanes.count * pb.d;
  begin_keys(pb, lanes, partial ? Visit() : piece.visit, turns, dk);
  if (piece.begin < piece.end) {
    pack<Op>(pb.k, lanes, pb.d, scale.packed, m.x, m.rows);
    pack<Op>(pb.v, lanes, pb.dv_dim, 1, m.y, m.rows);
    // The product dS K uses 0 for broken keys. A row that attends one has dS = NaN already, or 0 at a score of -inf.
    // 0 * NaN must not spread to other rows.
    bad = find_bad(pb.k, lanes, pb.d, m.bad, m.rows) ? m.bad : nullptr;
    pack_channels<Op>(tile_columns<Op>(pb.k, u.batch, u.kv_head, lanes.first, lanes.rows, pb.d, bad, m.a),
                      lanes.rows, pb.d, m.keys);
  }
  int64_t before = 0;  // number of entries of the previous heads
  for (int h = u.head; h < u.head + u.heads; ++h) {
    const int64_t g = plan.row_set[u.batch * pb.q_heads + h];
    const Entries all = column_entries(plan, g, piece.tile, turns.first, turns.first + turns.tiles);
    const int64_t begin = all.begin + larger(piece.begin - before, 0),
                  end = smaller(all.begin + piece.end - before, all.end);
    before += all.end - all.begin;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t i = plan.row[e], first = i * plan.q_tile;
      const int rows = (int)smaller(plan.q_tile, pb.nq - first);
      const Lanes queries{u.batch, h, first, 1, rows, rows, i};
      const View q = of_tile(pb.q, i), dout = of_tile(pb.dout, i);
      if constexpr (Scored) {
        pairs.head = h;
        pairs.set_rows(first, rows);
        if (pb.score_terms.drop)
          pairs.kept = kept_keys(pb, {u.batch, h, first, 1, rows, pad_lanes(rows)}, lanes.first, lanes.rows, m.dropout);
      }
      Streamed t;
      t.mask = column_mask<Op>(pb, plan.mask_id_t[e], rows, lanes.rows, m);
      const bool few = !Scored && find_few<Op>(pb, plan.mask_id_t[e], rows, lanes, places);
      const Lanes keys = few ? keep_few<Op>(pb, u, lanes, places, scale.packed, bad, m, t.mask, rows) : lanes;
      const BackwardMemory &of_keys = few ? of_few : m;
      float *sums = few ? m.few_dx : dk, *value_sums = sums + (size_t)keys.count * pb.d;
      t.rows = rows, t.key_count = keys.rows;
      if (e + 1 < end) {
        const int64_t then = (int64_t)plan.row[e + 1] * plan.q_tile;
        t.ahead = Ahead(of_tile(pb.q, plan.row[e + 1]), of_tile(pb.dout, plan.row[e + 1]), u.batch, h, then,
                        (int)smaller(plan.q_tile, pb.nq - then), pb.d, pb.dv_dim);
      }
      gather(pb.lse, queries, -kInf, m.low);
      t.mask = without_empty(t.mask, m.low, rows, keys.rows, plan.words, m);
      Dead dead = t.mask.dead;
      const Dead broken = broken_rows(m.low, rows, dead, m.broken);
      lows(m.low, rows);
      gather(pb.delta, queries, 0, m.delta);
      const Live live = live_rows<Op>(rows, dead);
      if (broken == m.broken) dead = broken + live.first;
      const int64_t start = first + live.first;
      const int count = live.count(), pair = live.first / Op::depth;
      t.a = tile_rows<Op>(q, u.batch, h, start, count, pb.d, dead, m.a).from(live.first);
      t.b = tile_rows<Op>(dout, u.batch, h, start, count, pb.dv_dim, dead, m.b).from(live.first);
      t.a_columns = t.a, t.b_columns = t.b;
      if (Op::depth == 2) {
        t.a_columns = tile_columns<Op>(q, u.batch, h, start, count, pb.d, dead, m.a_columns).from(pair);
        t.b_columns = tile_columns<Op>(dout, u.batch, h, start, count, pb.dv_dim, dead, m.b_columns).from(pair);
      }
      const int64_t at =
          ((int64_t)(piece.unit - turns.unit) * u.heads + (h - u.head)) * turns.tiles + (i - turns.first);
      t.dq = turns.sums + at * sum_floats(pb);
      int32_t *done = turns.done + at;
      const int32_t turn = turns.rank[e];
      const bool finite = finite_deltas(m.delta, rows);
      if (!finite) {
        const Dead copied = dead ? dead : (Dead)memset(m.broken, 0, (size_t)count);  // not read in place
        t.b_columns = tile_columns<Op>(dout, u.batch, h, start, count, pb.dv_dim, copied, m.b_columns).from(pair);
        keep_finite(m.b_columns, column_elements<Op>(count, pb.dv_dim), Op());
      }
      for (int lane = 0; lane < keys.count; lane += panel_width(lane, keys.count)) {
        const int n = panel_width(lane, keys.count) / W;
        if (kWide == 4 && n == 4)
          backward_panel<Op, kWide, Scored>(pb, of_keys, size, lane, t, done, turn, sums, value_sums, pairs);
        else if (n == 2)
          backward_panel<Op, 2, Scored>(pb, of_keys, size, lane, t, done, turn, sums, value_sums, pairs);
        else
          backward_panel<Op, 1, Scored>(pb, of_keys, size, lane, t, done, turn, sums, value_sums, pairs);
      }
      if (!finite) add_broken_gradients(pb, queries, live, dead, t.mask, keys, value_sums, m.rows);
      if (few) add_few(lanes, places, pb.d, sums, dk), add_few(lanes, places, pb.dv_dim, value_sums, dv);
      if (Scored) pairs.end_rows();
      if (turn + 1 == turns.total[g * plan.q_tiles + i]) write_query_tile(pb, queries, t.dq, m.rows);
      __atomic_store_n(done, turn + 1, __ATOMIC_RELEASE);
    }
  }
  if (!partial) end_keys(pb, lanes, piece.visit, turns, dk, m);
}

inline void backward_join(const Problem &pb, const Unit &u, const Join &join, const Turns &turns, char *block,
                          const float *partials, size_t stride) {
  const Lanes lanes = key_lanes(pb, u, join.tile);
  const BackwardMemory m(pb, lanes.count, block);
  const size_t n = (size_t)lanes.count * (pb.d + pb.dv_dim);
  begin_keys(pb, lanes, join.visit, turns, m.dx);
  for (int i = 0; i < join.slots; ++i) {
    const float *from = partials + (size_t)(join.slot + i) * stride;
    for (size_t j = 0; j < n; ++j) m.dx[j] += from[j];
  }
  end_keys(pb, lanes, join.visit, turns, m.dx, m);
}

}  // namespace
}  // namespace ringweave
