// dK and dV of a task: their initial values, their results, and their storage between the windows of backward.
#pragma once
#include "backward_panel.h"

namespace ringweave {
namespace {

inline Lanes key_lanes(const Problem &pb, const Unit &u, int tile) {
  const int64_t first = (int64_t)tile * pb.plan.kv_tile;
  const int rows = (int)smaller(pb.plan.kv_tile, pb.nk - first);
  return {u.batch, u.kv_head, first, 1, rows, pad_lanes(rows)};
}

inline void write_scaled(const View &t, const Lanes &lanes, int width, const float *from, float factor,
                         const PerLane<float> &factors, char *memory) {
  factors.fill(lanes.count, [&](int) { return factor; });
  unpack(t, lanes, width, from, factors, memory);
}

// Whether the queries of an entry attend so few of its keys that these are packed by themselves; finds their places.
template <class Op>
inline bool find_few(const Problem &pb, int32_t mask_id, int rows, const Lanes &lanes, Places &places) {
  const Plan &plan = pb.plan;
  if (mask_id < 0) return false;
  const uint32_t *mask = (const uint32_t *)plan.mask_words + (ptrdiff_t)mask_id * plan.q_tile * plan.words;
  find_places(mask, rows, plan.words, lanes.rows, 1, places);
  return places.count && pad_lanes(places.count) <= most_few(lanes.count);
}

// Packs the keys at the places, as the lanes of a task with their sums at 0, and keeps their bits of the mask.
template <class Op>
inline Lanes keep_few(const Problem &pb, const Unit &u, const Lanes &lanes, const Places &places, float factor, Dead broken,
                      const BackwardMemory &m, TileMask &mask, int rows) {
  const Lanes few{u.batch, u.kv_head, lanes.first, 1, places.count, pad_lanes(places.count)};
  pack<Op>(pb.k, few, pb.d, factor, m.few_x, m.rows, &places);
  pack<Op>(pb.v, few, pb.dv_dim, 1, m.few_y, m.rows, &places);
  for (int i = 0; broken && i < places.count; ++i) m.few_bad[i] = broken[places.row[i]];
  const Dead bad = broken ? m.few_bad : nullptr;
  pack_channels<Op>(
      tile_columns<Op>(pb.k, u.batch, u.kv_head, lanes.first, places.count, pb.d, bad, m.a, false, &places),
      places.count, pb.d, m.few_keys);
  memset(m.few_dx, 0, 4 * (size_t)few.count * (pb.d + pb.dv_dim));
  mask.words = keep_bits(mask.rows, rows, mask.words, places, m.mask);
  mask.rows = m.mask;
  return few;
}

// Adds the sums of the keys at the places to those of all keys.
inline void add_few(const Lanes &lanes, const Places &places, int width, const float *few, float *all) {
  const int count = pad_lanes(places.count);
  for (int p = 0; p < places.count; p += panel_width(p, count)) {
    const int pw = panel_width(p, count), n = (int)smaller(pw, places.count - p);
    for (int i = 0; i < n; ++i) {
      const int place = places.row[p + i];
      int start = 0;
      while (place >= start + panel_width(start, lanes.count)) start += panel_width(start, lanes.count);
      const int step = panel_width(start, lanes.count);
      float *to = all + (ptrdiff_t)start * width + (place - start);
      const float *from = few + (ptrdiff_t)p * width + i;
      for (int c = 0; c < width; ++c) to[(ptrdiff_t)c * step] += from[(ptrdiff_t)c * pw];
    }
  }
}

// Calls f(element of the result, lane's sum, additional byte) for each channel of each key.
template <class Sum, class Low, class F>
RW_INLINE void each_sum(const View &t, const Lanes &lanes, int width, Sum *sums, Low *low, F f) {
  for (int p = 0; p < lanes.rows; p += panel_width(p, lanes.count)) {
    const int pw = panel_width(p, lanes.count);
    for (int r = p; r < smaller(lanes.rows, p + pw); ++r) {
      char *to = row_at(t, lanes.batch, lanes.head, lanes.first + r);
      Sum *from = sums + (ptrdiff_t)p * width + (r - p);
      for (int c = 0; c < width; ++c)
        f(to + c * bytes_of(t.dtype), from + (ptrdiff_t)c * pw, low + (ptrdiff_t)r * width + c);
    }
  }
}

// Keeps the sums of a column for a later window. The upper bits are stored in the result's memory, and for a 16-bit
// result eight more bits in `low`. The rounding error of 2^-17 per window is small compared to the result's.
inline void keep_sums(const View &t, const Lanes &lanes, int width, const float *sums, uint8_t *low) {
  const bool whole = t.dtype == F32;
  each_sum(t, lanes, width, sums, low, [&](char *to, const float *sum, uint8_t *rest) {
    if (whole) return (void)memcpy(to, sum, 4);
    uint32_t u = bits_of(*sum);
    u = (u & 0x7fffffff) > 0x7f800000u ? u | 0x400000 : u + 0x80;
    const uint16_t high = (uint16_t)(u >> 16);
    memcpy(to, &high, 2);
    *rest = (uint8_t)(u >> 8);
  });
}

inline void resume_sums(const View &t, const Lanes &lanes, int width, float *sums, const uint8_t *low) {
  const bool whole = t.dtype == F32;
  each_sum(t, lanes, width, sums, low, [&](const char *from, float *sum, const uint8_t *rest) {
    if (whole) return (void)memcpy(sum, from, 4);
    uint16_t high;
    memcpy(&high, from, 2);
    *sum = float_of((uint32_t)high << 16 | (uint32_t)*rest << 8);
  });
}

// Set up dK and dV of a task before a window, and write or keep them after it.
inline void begin_keys(const Problem &pb, const Lanes &lanes, const Visit &visit, const Turns &turns, float *dk) {
  const size_t before = (size_t)lanes.count * pb.d;
  memset(dk, 0, 4 * (size_t)lanes.count * (pb.d + pb.dv_dim));
  if (!visit.resume) return;
  const uint8_t *low = turns.kept + visit.slot * kept_bytes(pb);
  resume_sums(pb.dk, lanes, pb.d, dk, low);
  resume_sums(pb.dv, lanes, pb.dv_dim, dk + before, low + (pb.dk.dtype == F32 ? 0 : lanes.rows * pb.d));
}

inline void end_keys(const Problem &pb, const Lanes &lanes, const Visit &visit, const Turns &turns, const float *dk,
                     const BackwardMemory &m) {
  const float *dv = dk + (size_t)lanes.count * pb.d;
  if (!visit.keep) {
    write_scaled(pb.dk, lanes, pb.d, dk, pb.scale, m.low, m.rows);
    write_scaled(pb.dv, lanes, pb.dv_dim, dv, pb.score_terms.kept_factor(), m.low, m.rows);
    return;
  }
  uint8_t *low = turns.kept + visit.slot * kept_bytes(pb);
  keep_sums(pb.dk, lanes, pb.d, dk, low);
  keep_sums(pb.dv, lanes, pb.dv_dim, dv, low + (pb.dk.dtype == F32 ? 0 : lanes.rows * pb.d));
}

}  // namespace
}  // namespace ringweave
