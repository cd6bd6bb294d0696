// Sums of the weights in each tile, computed from the products and a known lse.
#pragma once
#include "forward.h"

namespace ringweave {
namespace {

struct MassMemory {
  float *q, *sum;
  PerLane<float> lse;
  char *k, *rows;
  uint32_t *mask;
  uint8_t *dead;
  size_t bytes;
  MassMemory(const Problem &pb, int lanes, char *block) {
    Carve m{block};
    const int keys = pb.plan.kv_tile;
    q = m.take<float>((size_t)lanes * pb.d);
    lse = {m, (size_t)lanes};
    sum = m.take<float>(lanes);
    k = m.take<char>((size_t)keys * pb.d * 4);
    rows = m.take<char>((size_t)pb.d * 4 * W);
    mask = m.take<uint32_t>((size_t)keys * ((lanes + 31) / 32));
    dead = m.take<uint8_t>(keys);
    bytes = (size_t)(m.at - block);
  }
};

// One key tile against one panel of lanes.
template <class Op, int N>
inline void mass_panel(const Problem &pb, const MassMemory &m, float size, int lane, Tile k, int keys,
                       const TileMask &mask, const Ahead &ahead) {
  V sum[N], low[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) sum[j] = V{}, low[j] = load(m.lse + lane + j * W);
  sweep<Op, true, N>(
      k.data, k.ld, keys, pb.d / Op::depth, m.q + (ptrdiff_t)lane * (pb.d / Op::depth),
      [&](auto block, int r) __attribute__((always_inline)) {
        ahead.fetch(r, r + decltype(block)::value);
      },
      [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) {
            // as in backward, a score is rounded before lse is subtracted
            const V x = (acc[i][j] * splat(size) - low[j]) * splat(kLog2e);
            V p = exp2(min(splat(128.f), x));
            if (mask.rows) p = select(mask_at(mask.rows + (ptrdiff_t)(r + i) * mask.words, lane + j * W), p, V{});
            sum[j] += p;
          }
      });
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) store(m.sum + lane + j * W, sum[j]);
}

// The entries of one piece. One thread computes a tile's sums, in a fixed order.
template <class Op>
inline void mass_piece(const Problem &pb, const Unit &u, const Piece &piece, const Mass &mass, char *block) {
  if (piece.begin == piece.end) return;
  const Plan &plan = pb.plan;
  const Lanes lanes = query_lanes(pb, u, piece.tile);
  const MassMemory m(pb, lanes.count, block);
  const Scale scale(pb);
  const float size = scale.before * scale.size;
  pack<Op>(pb.q, lanes, pb.d, scale.packed, m.q, m.rows);
  gather(pb.lse, lanes, kInf, m.lse);
  // a row that attends nothing has zero weights
  for (int i = 0; i < lanes.count; ++i) m.lse[i] = m.lse[i] == -kInf ? kInf : m.lse[i];
  const int64_t g = plan.row_set[u.batch * pb.q_heads + u.head];
  const int32_t *ends = plan.row_ptr + g * (plan.q_tiles + 1);
  const int64_t last = ends[piece.tile] + piece.end;
  for (int64_t e = ends[piece.tile] + piece.begin; e < last; ++e) {
    const int64_t first = (int64_t)plan.col[e] * plan.kv_tile;
    const int keys = (int)smaller(plan.kv_tile, pb.nk - first);
    TileMask allowed;
    if (plan.mask_id[e] >= 0)
      allowed = turn_mask((const uint32_t *)plan.mask_words + (ptrdiff_t)plan.mask_id[e] * plan.q_tile * plan.words, plan.words,
                          lanes, keys, m.mask, m.dead);
    Ahead next;
    if (e + 1 < last) {
      const int64_t then = (int64_t)plan.col[e + 1] * plan.kv_tile;
      next = Ahead(pb.k, u.batch, u.kv_head, then, (int)smaller(plan.kv_tile, pb.nk - then), pb.d);
    }
    const Tile k = tile_rows<Op>(pb.k, u.batch, u.kv_head, first, keys, pb.d, nullptr, m.k);
    for (int lane = 0; lane < lanes.count; lane += panel_width(lane, lanes.count)) {
      const int n = panel_width(lane, lanes.count) / W;
      if (kWide == 4 && n == 4)
        mass_panel<Op, kWide>(pb, m, size, lane, k, keys, allowed, lane ? Ahead() : next);
      else if (n == 2)
        mass_panel<Op, 2>(pb, m, size, lane, k, keys, allowed, lane ? Ahead() : next);
      else
        mass_panel<Op, 1>(pb, m, size, lane, k, keys, allowed, lane ? Ahead() : next);
    }
    for (int h = 0; h < lanes.heads; ++h) {
      const float *sum = m.sum + h * lanes.rows;
      float *to = mass.values + (mass.first[u.batch * pb.q_heads + u.head + h] + e - ends[0]) * mass.width;
      if (mass.width == 1) {
        double total = 0;
        for (int r = 0; r < lanes.rows; ++r) total += sum[r];
        *to = (float)total;
        continue;
      }
      memcpy(to, sum, 4 * (size_t)lanes.rows);
      memset(to + lanes.rows, 0, 4 * (size_t)(plan.q_tile - lanes.rows));
    }
  }
}

}  // namespace
}  // namespace ringweave
