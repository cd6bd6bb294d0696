// Forward: S^T = K Q^T with queries across lanes, an online softmax over the keys, O^T += V^T P^T.
//
// With queries across lanes, K and V are never transposed, since each of their elements is broadcast from its place in
// memory. Row maxima and sums are plain vector operations.
#pragma once
#include "contract.h"
#include "dropout.h"
#include "terms.h"

namespace ringweave {
namespace {

// Tiles with up to this many queries, over all heads that share its keys, are computed by decode.h. With more queries,
// their vectors are full enough (measured).
constexpr int kFew = 4;
inline bool has_few(const Problem &pb, int64_t tile) { return !pb.selects && tile_queries(pb, tile) <= kFew; }

// A score is size * s with size > 0, so that -inf keeps marking masked pairs. Packed queries are multiplied by the
// scale's sign (or 0), and by its power of two if the scale is below 1: then a product is in range if its score is, and
// no other bit changes. Differences of s are taken first and then multiplied by c = size * log2(e). A fused c s - c top
// would be off by the rounding error of c top, which exceeds any exponent if scores are large. With terms, s is a
// product times `before`, after the terms. If |s| exceeds `most`, the score is out of float32's range.
struct Scale {
  float packed, before = 1, size = 1, c, most;
  explicit Scale(const Problem &pb) {
    const float whole = fabsf(pb.scale), power = fmaxf(float_of(bits_of(whole) & 0x7f800000u), 0x1p-126f);
    packed = pb.scale == 0 ? 0 : copysignf(fminf(power, 1), pb.scale);
    (pb.score_terms.count ? before : size) = packed == 0 ? 1 : whole / fabsf(packed);
    c = size * kLog2e, most = kMostFloat / size;
  }
};

// The state of a task's lanes: unnormalised O^T, the running maximum of s, and the running sum.
struct Running {
  float *out, *top, *sum;
  size_t floats;
  Running(float *at, int lanes, int dv)
      : out(at), top(at + (size_t)lanes * dv), sum(top + lanes), floats((size_t)lanes * (dv + 2)) {}
  void reset(int lanes, int dv) const {
    memset(out, 0, 4 * (size_t)lanes * dv);
    for (int i = 0; i < lanes; ++i) top[i] = -kInf, sum[i] = 0;
  }
};

// Adds a later block's sum to the total.
RW_INLINE V joined(V total, V a, V part, V b) { return fused(total, a, part * b); }

// Adds a later block's state to a total. With `full` (bits by lane), only these lanes are added, and then reset.
inline void join_state(Running total, Running part, int lanes, int dv, float c, const uint32_t *full = nullptr) {
  for (int p = 0; p < lanes; p += panel_width(p, lanes)) {
    const int pw = panel_width(p, lanes);
    for (int lane = p; lane < p + pw; lane += W) {
      const Mask these = full ? mask_at(full, lane) : mask_of(~0u);
      V before = load(total.top + lane), other = select(these, load(part.top + lane), splat(-kInf));
      V now = max(before, other), low = no_inf(now);
      V a = exp2((before - low) * splat(c)), b = exp2((other - low) * splat(c));
      store(total.top + lane, now);
      store(total.sum + lane, joined(load(total.sum + lane), a, load(part.sum + lane), b));
      for (int ch = 0; ch < dv; ++ch) {
        ptrdiff_t at = (ptrdiff_t)p * dv + (ptrdiff_t)ch * pw + (lane - p);
        const V out = load(part.out + at);
        store(total.out + at, joined(load(total.out + at), a, out, b));
        if (full) store(part.out + at, select(these, V{}, out));
      }
      if (!full) continue;
      store(part.top + lane, select(these, splat(-kInf), load(part.top + lane)));
      store(part.sum + lane, select(these, V{}, load(part.sum + lane)));
    }
  }
}

struct ForwardMemory {
  float *q, *state, *total, *s, *k_scales = nullptr, *v_scales = nullptr;  // scales: null without 8-bit types
  PerLane<float> factor;
  char *k, *v, *rows;
  uint32_t *mask;
  uint8_t *dead;
  PerLane<int32_t> attended, ends;
  TermMemory terms;
  DropoutMemory dropout;
  size_t bytes;
  ForwardMemory(const Problem &pb, int lanes, char *block) {
    Carve m{block};
    // the first tile has the most queries, and tiles with few queries do not copy keys
    const int width = (int)larger(pb.d, pb.dv_dim), keys = pb.plan.kv_tile, copied = has_few(pb, 0) ? 0 : keys;
    q = m.take<float>((size_t)lanes * pb.d);
    state = m.take<float>((size_t)lanes * (pb.dv_dim + 2));
    total = m.take<float>((size_t)lanes * (pb.dv_dim + 2));
    s = m.take<float>(copied ? (size_t)kPanelRows * kWide * W : 0);
    factor = {m, (size_t)lanes};
    k = m.take<char>((size_t)copied * pb.d * 4);
    v = m.take<char>((size_t)copied * pb.dv_dim * 4);
    rows = m.take<char>((size_t)width * 4 * W);
    mask = m.take<uint32_t>((size_t)keys * ((lanes + 31) / 32));
    dead = m.take<uint8_t>(keys);
    attended = {m, (size_t)lanes}, ends = {m, (size_t)lanes};
    if (pb.k.scales) k_scales = m.take<float>(keys), v_scales = m.take<float>(keys);
    terms = TermMemory(pb, m, lanes, false);
    dropout = DropoutMemory(pb, m, lanes);
    bytes = (size_t)(m.at - block);
  }
};

// Rows of a tile of a view after `row`, up to `end`, that are in the same tile of the whole (tile_cut), or in the same
// panel of it (panel_cut). Returns one past the last of them.
inline int cut_after(const Spacing &s, int row, int end, int64_t tokens) {
  return (int)smaller(end, row + (tokens + s.step - 1) / s.step);
}
inline int tile_cut(const Spacing &s, int row, int end) {
  return cut_after(s, row, end, s.side - (s.first + s.step * row) % s.side);
}
inline int panel_cut(const Spacing &s, int row, int end) {
  const int64_t at = (s.first + s.step * row) % s.side;
  return cut_after(s, row, end, smaller(kPanelRows - at % kPanelRows, s.side - at));
}
// One past the last row that is computed together with `row`: at most a panel, so that S^T stays in L1, and no part of
// a panel of the whole. With places, the rows of a panel are those with places in it.
inline int chunk_end(const Spacing &s, const Places *places, int row, int end) {
  if (places) {
    const int panel = places->row[row] / kPanelRows;
    while (++row < end && places->row[row] / kPanelRows == panel) {
    }
    return row;
  }
  if (!s.apart()) return (int)smaller(end, row + kPanelRows);
  int last = panel_cut(s, row, end);
  for (int next = last; next < end && (next = panel_cut(s, last, end)) <= row + kPanelRows;) last = next;
  return last;
}

// For each lane: the number of tiles that it has attended, and the number at which its current block ends. In a view,
// these are tiles of the whole.
struct Blocks {
  const PerLane<int32_t> attended, end;
  int lanes, tiles;  // of a block
  const Spacing spacing;
  Blocks(const Problem &pb, const ForwardMemory &m, int lanes, int64_t at)
      : attended(m.attended), end(m.ends), lanes(lanes),
        tiles((int)block_tiles(pb, pb.spacing.apart() ? pb.spacing.side : pb.plan.kv_tile)), spacing(pb.spacing) {
    const auto ended = (int32_t)block_end(at, tiles);
    attended.fill(lanes, [&](int) { return (int32_t)at; });
    end.fill(lanes, [&](int) { return ended; });
  }
  // Counts the tile of the keys from `from` on, and the tiles after it that begin no block. Marks in `full` the lanes
  // for which the first tile begins another block, and sets `any` if there are any. Returns one past the counted keys.
  int next(const TileMask &mask, int from, int keys, uint32_t *full, bool &any) const {
    int to = spacing.apart() ? tile_cut(spacing, from, keys) : keys;
    any = begin(mask, from, to, full);
    for (int i = 0; any && i < lanes; ++i)
      if (full[i / 32] >> (i % 32) & 1) end[i] = (int32_t)block_end(end[i], tiles);
    count(mask, from, to);
    while (to < keys) {
      const int after = tile_cut(spacing, to, keys);
      uint32_t others[kMostLanes / 32];
      if (begin(mask, to, after, others)) break;
      count(mask, to, after);
      to = after;
    }
    return to;
  }

 private:
  uint32_t some(const TileMask &mask, int from, int to, int lane) const {
    uint32_t bits = mask.rows ? 0 : ~0u;
    for (int r = from; mask.rows && r < to; ++r) bits |= mask.rows[(ptrdiff_t)r * mask.words + lane / 32];
    return bits;
  }
  bool begin(const TileMask &mask, int from, int to, uint32_t *full) const {
    bool any = false;
    for (int first = 0; first < lanes; first += 32) {
      const int n = (int)smaller(32, lanes - first);
      uint32_t ended = 0;
      for (int i = 0; i < n; ++i) ended |= (uint32_t)(attended[first + i] == end[first + i]) << i;
      full[first / 32] = ended ? ended & some(mask, from, to, first) : 0;
      any |= full[first / 32] != 0;
    }
    return any;
  }
  void count(const TileMask &mask, int from, int to) const {
    for (int first = 0; first < lanes; first += 32) {
      const uint32_t bits = some(mask, from, to, first);
      const int n = (int)smaller(32, lanes - first);
      for (int i = 0; i < n; ++i) attended[first + i] += (int32_t)(bits >> i & 1);
    }
  }
};

inline Lanes query_lanes(const Problem &pb, const Unit &u, int tile) {
  const int64_t first = (int64_t)tile * pb.plan.q_tile;
  const int rows = (int)smaller(pb.plan.q_tile, pb.nq - first);
  return {u.batch, u.head, first, u.heads, rows, pad_lanes((int64_t)u.heads * rows), tile};
}

// Factors of one panel's weights: Every keeps all weights; Kept applies dropout's bits and the scales of the values.
struct Every {
  RW_INLINE V operator()(V p, int, int) const { return p; }
};
struct Kept {
  const uint32_t *bits;  // of the first row; null: all
  int words, lane;
  const float *scales = nullptr;
  RW_INLINE V operator()(V p, int r, int j) const {
    if (bits) p = select(mask_at(bits + (ptrdiff_t)r * words, lane + j * W), p, V{});
    return scales ? p * splat(scales[r]) : p;
  }
};

// Replaces S of one chunk by P in place, after `kept`, and adds the weights before `kept` to the sums.
template <int N, class Keep>
RW_INLINE void exponentials(float *s, int keys, float c, const V (&low)[N], V (&sum)[N], Keep kept, Single) {
  const V cv = splat(c);
  for (int r = 0; r < keys; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      V p = exp2((load(s + (r * N + j) * W) - low[j]) * cv);
      sum[j] += p;
      store(s + (r * N + j) * W, kept(p, r, j));
    }
}
#if defined(RW_PAIRS)
template <int N, class Keep>
RW_INLINE void exponentials(float *s, int keys, float c, const V (&low)[N], V (&sum)[N], Keep kept, Pair) {
  const V cv = splat(c);
  for (int r = 0; r < keys; r += 2)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      V p = exp2((load(s + (r * N + j) * W) - low[j]) * cv);
      V o = r + 1 < keys ? exp2((load(s + ((r + 1) * N + j) * W) - low[j]) * cv) : V{};
      sum[j] += p + o;
      store(s + (r / 2 * N + j) * W, pair(kept(p, r, j), r + 1 < keys ? kept(o, r + 1, j) : o));
    }
}
// Each weight in a pair with 0, for a view: of two keys that are a pair in the whole, a row attends at most one.
template <class Keep>
struct Alone {
  Keep kept;
  RW_INLINE V operator()(V p, int r, int j) const { return pair(kept(p, r, j), V{}); }
};
#endif
template <class Op, int N, class Keep>
RW_INLINE void weights(bool apart, float *s, int keys, float c, const V (&low)[N], V (&sum)[N], Keep kept) {
#if defined(RW_PAIRS)
  if (apart) return exponentials(s, keys, c, low, sum, Alone<Keep>{kept}, Single());
#endif
  (void)apart;
  exponentials(s, keys, c, low, sum, kept, Op());
}

// Applies the terms to a panel of products in place, masks the result, and updates the maximum of each lane.
template <int N>
RW_INLINE void score(const Pairs &pairs, float *s, int k0, int n, int lane, const TileMask &mask, V (&top)[N]) {
  pairs.apply(s, k0, n, lane, N * W);
  for (int r = 0; r < n; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      float *at = s + (r * N + j) * W;
      V x = load(at);
      if (mask.rows) {
        x = select(mask_at(mask.rows + (ptrdiff_t)(k0 + r) * mask.words, lane + j * W), x, splat(-kInf));
        store(at, x);
      }
      top[j] = max(x, top[j]);
    }
}

// Processes a chunk of a tile's keys for N vectors of a panel of P vectors, from vector `part` on, with one update of
// the running maximum, or in a view one for each panel of the whole. Scored: the call has terms, dropout or scales of
// 8-bit keys and values. As in decode.h, the scales multiply scores and weights.
template <class Op, int N, int P, bool Scored>
inline void forward_chunk(const Problem &pb, const ForwardMemory &m, const Running &state, const Scale &scale,
                          int panel, int part, Tile k, Tile v, Live live, const TileMask &mask, const Ahead &ahead,
                          const Pairs &pairs) {
  const float c = scale.c;
  const int k0 = live.first, n = live.count(), lane = panel + part * W;
  const float *q = m.q + (ptrdiff_t)panel * (pb.d / Op::depth) + part * W;
  float *out = state.out + (ptrdiff_t)panel * pb.dv_dim + part * W, *s = m.s;
  V top[N], bottom[N];
  for (int j = 0; j < N; ++j) top[j] = splat(-kInf), bottom[j] = splat(kInf);
  const auto begin = [&](auto block, int r) __attribute__((always_inline)) {
    ahead.fetch(k0 + r, k0 + r + decltype(block)::value);
  };
  const auto masked = [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
    constexpr int M = decltype(block)::value;
    if (Scored && m.k_scales) {
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[i][j] *= splat(m.k_scales[k0 + r + i]);
    }
    if (mask.rows) {
      const uint32_t *bits = mask.rows + (ptrdiff_t)(k0 + r) * mask.words;
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i, bits += mask.words)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
          const Mask allowed = mask_at(bits, lane + j * W);
          bottom[j] = min(select(allowed, acc[i][j], splat(kInf)), bottom[j]);
          if (!Scored) acc[i][j] = select(allowed, acc[i][j], splat(-kInf));
        }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) bottom[j] = min(acc[i][j], bottom[j]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        if (!Scored) top[j] = max(acc[i][j], top[j]);
        store(s + ((r + i) * N + j) * W, Scored ? acc[i][j] * splat(scale.before) : acc[i][j]);
      }
  };
  const char *keys = k.data + k0 * k.ld;
  sweep<Op, true, N, P>(keys, k.ld, n, pb.d / Op::depth, q, begin, masked);
  if constexpr (Scored) score(pairs, s, k0, n, lane, mask, top);
  V least = bottom[0];
  for (int j = 1; j < N; ++j) least = min(bottom[j], least);
  if (any_below(least, -scale.most)) mark(pb.below);

  const bool split = pb.spacing.apart(), apart = split && Op::depth == 2;
  for (int r0 = 0, count; r0 < n; r0 += count, s += count * N * W) {
    count = split ? panel_cut(pb.spacing, k0 + r0, live.last) - k0 - r0 : n;
    if (split) {
      for (int j = 0; j < N; ++j) top[j] = splat(-kInf);
      for (int r = 0; r < count; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) top[j] = max(load(s + (r * N + j) * W), top[j]);
    }
    V low[N], sum[N], shrink[N];
    for (int j = 0; j < N; ++j) {
      V before = load(state.top + lane + j * W);
      V now = max(top[j], before);
      low[j] = no_inf(now);  // without any key so far, every exponent is -inf whatever is subtracted
      shrink[j] = exp2((before - low[j]) * splat(c));
      sum[j] = V{};
      store(state.top + lane + j * W, now);
    }
    if constexpr (Scored) {
      const TileMask &kept = pairs.kept;
      const Kept keep{kept.rows ? kept.rows + (ptrdiff_t)(k0 + r0) * kept.words : nullptr, kept.words, lane,
                      m.v_scales ? m.v_scales + k0 + r0 : nullptr};
      weights<Op>(apart, s, count, c, low, sum, keep);
    } else {
      weights<Op>(apart, s, count, c, low, sum, Every());
    }
    for (int j = 0; j < N; ++j) store(state.sum + lane + j * W, fused(load(state.sum + lane + j * W), shrink[j], sum[j]));

    const auto add = [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
      // as in add_block, the products were summed from 0
#pragma GCC unroll 16
      for (int i = 0; i < decltype(block)::value; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
          float *to = out + ((r + i) * P + j) * W;
          store(to, fused(load(to), shrink[j], acc[i][j]));
        }
    };
    const char *values = v.data + (ptrdiff_t)((k0 + r0) / (apart ? 1 : Op::step)) * v.ld;
    sweep<Op, false, N>(values, v.ld, pb.dv_dim, apart ? count : (count + Op::depth - 1) / Op::depth, s, Nothing(), add);
  }
}

// Processes the keys [from, to) of a tile, or of its places, for one panel of lanes. Keys at both ends of the mask that
// no lane attends are skipped, for each half of the panel separately if that saves enough. Skipping changes no bit,
// since a key that a lane does not attend adds 0.
template <class Op, int N, bool Scored>
inline void forward_panel(const Problem &pb, const ForwardMemory &m, const Running &state, const Scale &scale, int lane,
                          Tile k, Tile v, const Places *places, int from, int to, const TileMask &mask,
                          const Ahead &ahead, const Pairs &pairs) {
  for (int k0 = from, n; k0 < to; k0 += n) {
    n = chunk_end(pb.spacing, places, k0, to) - k0;
    const Live all = live_rows<Op>(mask, k0, n, lane, N * W);
    ahead.fetch(k0, all.first);
    ahead.fetch(all.last, k0 + n);
    if (all.count() == 0) continue;
    if constexpr (N * W > 32) {
      if (mask.rows) {
        constexpr int half = N / 2;
        const Live low = live_rows<Op>(mask, k0, n, lane, half * W);
        const Live high = live_rows<Op>(mask, k0, n, lane + half * W, half * W);
        if (apart(all, low, high)) {
          ahead.fetch(all.first, all.last);
          if (low.count())
            forward_chunk<Op, half, N, Scored>(pb, m, state, scale, lane, 0, k, v, low, mask, Ahead(), pairs);
          if (high.count())
            forward_chunk<Op, half, N, Scored>(pb, m, state, scale, lane, half, k, v, high, mask, Ahead(), pairs);
          continue;
        }
      }
    }
    forward_chunk<Op, N, N, Scored>(pb, m, state, scale, lane, 0, k, v, all, mask, ahead, pairs);
  }
  if (places) ahead.fetch(to, kMostTile);
}

// Normalises and writes the results. A row's lse is its maximum, rounded as backward rounds scores, plus the logarithm
// of its sum.
inline void forward_finish(const Problem &pb, const Lanes &lanes, const ForwardMemory &m, const Running &state) {
  const Scale scale(pb);
  const float size = scale.size, kept = pb.score_terms.kept_factor();
  m.factor.fill(lanes.count, [&](int i) {
    if (i >= lanes.count) return 0.f;
    // with a score out of range, the sum may still be a number
    const float sum = state.top[i] > scale.most ? kNan : state.sum[i];
    return sum == 0 ? 0.f : kept / sum;
  });
  if (unpack(pb.out, lanes, pb.dv_dim, state.out, m.factor, m.rows)) mark(pb.spread);
  for (int i = 0; i < lanes.count; ++i) {
    char *to = const_cast<char *>(lane_row(pb.lse, lanes, i));
    if (!to) break;
    float lse = state.sum[i] == 0 ? -kInf : fused(state.top[i], size, logf(state.sum[i]));
    if (state.top[i] > scale.most) lse = kInf;  // an infinite score: its sum is inf - inf
    memcpy(to, &lse, 4);
  }
}

// Whether a row of a task is not finite although its scores are: a value that it attends is not, or one that another row
// attends.
inline bool may_have_spread(const Problem &pb, const Lanes &lanes, char *memory) {
  for (int i = 0; i < lanes.heads * lanes.rows; ++i) {
    const float lse = load1(lane_row(pb.lse, lanes, i));
    if (!(lse < kInf)) continue;
    widen((float *)memory, lane_row(pb.out, lanes, i), pb.out.dtype, pb.dv_dim);
    if (!all_finite((float *)memory, pb.dv_dim)) return true;
  }
  return false;
}

// Adds the elements of V that are not finite, which the products have taken as 0, to the lanes that attend them. The
// rows of V are `keys` of a tile from `first` on, or those at the places.
inline void add_broken_values(const Problem &pb, const Unit &u, const Lanes &lanes, int64_t first, Live keys,
                              const Places *places, const TileMask &mask, float *out, char *memory) {
  float *const row = (float *)memory;
  for (int r = keys.first; r < keys.last; ++r) {
    const int64_t token = first + (places ? places->row[r] : r);
    const float scale = pb.v.scales ? load1(token_at(*pb.v.scales, u.batch, u.kv_head, token)) : 1;
    widen(row, token_at(pb.v, u.batch, u.kv_head, token), pb.v.dtype, pb.dv_dim);
    if (!(fabsf(scale) < kInf))
      for (int c = 0; c < pb.dv_dim; ++c) row[c] *= scale;
    add_broken(row, pb.dv_dim, mask, r, lanes.heads * lanes.rows, lanes.count, out);
  }
}

// Location of the sums of blocks that several threads compute.
struct Partials {
  float *first;
  size_t stride;
};

// Adds the entries [begin, end) to a fresh state; the rows have attended `at` tiles before. The entries up to `last`
// follow. Returns the state with the joined sum of the blocks.
typedef Running AddEntries(const Problem &, const Unit &, const Lanes &, const ForwardMemory &, const Running &state,
                           int64_t at, int64_t begin, int64_t end, int64_t last, const Next &);

inline int64_t first_entry(const Problem &pb, const Unit &u, int64_t tile) {
  const int64_t g = pb.plan.row_set[u.batch * pb.q_heads + u.head];
  return pb.plan.row_ptr[g * (pb.plan.q_tiles + 1) + tile];
}

// Sums the blocks of a piece into the piece's slots, or returns their joined sum if the piece is the whole list.
inline Running sum_blocks(const Problem &pb, const Unit &u, const Piece &piece, const Next &next, const Lanes &lanes,
                          const ForwardMemory &m, const Partials &partials, AddEntries *add) {
  const int64_t start = first_entry(pb, u, piece.tile), last = start + piece.end;
  const bool whole = piece.slot < 0;
  Running state(m.state, lanes.count, pb.dv_dim);
  float *to = whole ? nullptr : partials.first + partials.stride * piece.slot;
  int64_t at = piece.begin;
  do {
    const int64_t end = whole ? piece.end : smaller(piece.end, block_end(at, block_tiles(pb, pb.plan.kv_tile)));
    if (!whole) state = Running(to, lanes.count, pb.dv_dim), to += partials.stride;
    state.reset(lanes.count, pb.dv_dim);
    state = add(pb, u, lanes, m, state, at, start + at, start + end, last, next);
    at = end;
  } while (at < piece.end);
  return state;
}

inline Ahead keys_ahead(const Problem &pb, const Unit &u, int64_t entry) {
  const int64_t first = (int64_t)pb.plan.col[entry] * pb.plan.kv_tile;
  const int keys = (int)smaller(pb.plan.kv_tile, keys_of(pb, u.batch) - first);
  return keys > 0 ? Ahead(pb.k, pb.v, u.batch, u.kv_head, first, keys, pb.d, pb.dv_dim) : Ahead();  // past the pages
}

// Prefetches the rows of out that head h of a task writes, and the queries of the next task.
inline Ahead rows_ahead(const Problem &pb, const Lanes &lanes, const Next &next, int h) {
  Ahead rows(of_tile(pb.out, lanes.tile), lanes.batch, lanes.head + h, lanes.first, lanes.rows, pb.dv_dim);
  if (!next.piece || h >= next.unit->heads) return rows;
  const Lanes then = query_lanes(pb, *next.unit, next.piece->tile);
  const Ahead queries(of_tile(pb.q, then.tile), then.batch, then.head + h, then.first, then.rows, pb.d);
  rows.y = queries.x, rows.y_step = queries.x_step, rows.y_bytes = queries.x_bytes;
  return rows;
}

// The keys of an entry that `rows` queries attend, if only they are read and computed; null if all keys are. A view
// counts its keys by tiles of the whole, and terms with a table take their values by diagonals of the tile, so these
// read all keys.
template <class Op>
inline const Places *entry_places(const Problem &pb, int64_t b, int64_t entry, int rows, bool few, Places &to) {
  const Plan &plan = pb.plan;
  if (plan.mask_id[entry] < 0 || pb.spacing.apart()) return nullptr;
  for (int i = 0; i < pb.score_terms.count; ++i)
    if (pb.score_terms.terms[i].kind != Term::pointwise) return nullptr;
  const int keys = (int)smaller(plan.kv_tile, keys_of(pb, b) - (int64_t)plan.col[entry] * plan.kv_tile);
  const uint32_t *mask = (const uint32_t *)plan.mask_words + (ptrdiff_t)plan.mask_id[entry] * plan.q_tile * plan.words;
  find_places(mask, rows, plan.words, keys, Op::step, to);
  if (!to.count) return nullptr;
  // Measured: few queries read adjacent keys twice as fast as single keys. For many, a copy of the keys takes as long as
  // computing a sixteenth of them, and keys at both ends are skipped in any case.
  if (few) return 2 * to.count <= keys ? &to : nullptr;
  return 16 * to.count <= 15 * (to.row[to.count - 1] - to.row[0] + 1) ? &to : nullptr;
}

// Moves the rows at the places to the front of a tile's mask and of dropout's bits. Returns the number of places.
inline int keep_places(const Places &places, const TileMask &mask, const TileMask &kept, const ForwardMemory &m) {
  move_to_front(m.mask, places, mask.words), move_to_front(m.dead, places, 1);
  if (kept.rows) move_to_front(m.dropout.bits, places, kept.words);
  return places.count;
}

// An AddEntries function for packed queries.
template <class Op, bool Scored>
inline Running many_entries(const Problem &pb, const Unit &u, const Lanes &lanes, const ForwardMemory &m,
                            const Running &state, int64_t at, int64_t begin, int64_t end, int64_t last,
                            const Next &next) {
  const Plan &plan = pb.plan;
  const Scale scale(pb);
  const Running total(m.total, lanes.count, pb.dv_dim);
  const Blocks blocks(pb, m, lanes.count, at);
  bool several = false;
  Pairs pairs(pb, m.terms, u.batch, false);
  pairs.head = lanes.head, pairs.heads = lanes.heads;
  if (Scored) pairs.set_lanes(lanes.first, lanes.rows, lanes.count);
  const int64_t nk = keys_of(pb, u.batch);
  const bool values_in_keys = begins_with(pb.k, pb.d, pb.v, pb.dv_dim);
  Places of_entries[2];  // of even and of odd entries
  const auto places_of = [&](int64_t e) {
    return entry_places<Op>(pb, u.batch, e, lanes.rows, false, of_entries[e & 1]);
  };
  const Places *places, *places_ahead = begin < end ? places_of(begin) : nullptr;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t first = (int64_t)plan.col[e] * plan.kv_tile;
    int keys = (int)smaller(plan.kv_tile, nk - first);
    places = places_ahead, places_ahead = e + 1 < last ? places_of(e + 1) : nullptr;
    if (keys <= 0) continue;  // past the last page
    if (Scored) pairs.set_rows(first, keys);
    if (Scored && pb.score_terms.drop) pairs.kept = kept_pairs(pb, lanes, first, keys, m.dropout);
    TileMask mask;
    if (plan.mask_id[e] >= 0)
      mask = turn_mask((const uint32_t *)plan.mask_words + (ptrdiff_t)plan.mask_id[e] * plan.q_tile * plan.words, plan.words,
                       lanes, keys, m.mask, m.dead);
    const auto ahead = [&](int lane) {
      if (e + 1 < last) return lane ? Ahead() : keys_ahead(pb, u, e + 1).of(places_ahead);
      const int h = (lane - 1) / (kWide * W);
      if (lane) return h < lanes.heads ? rows_ahead(pb, lanes, next, h) : Ahead();
      return next.piece ? keys_ahead(pb, *next.unit, first_entry(pb, *next.unit, next.piece->tile) + next.piece->begin)
                        : Ahead();
    };
    if (places) keys = keep_places(*places, mask, pairs.kept, m);
    if (Scored && pb.k.scales) {
      row_scales(pb.k, u.batch, u.kv_head, first, keys, mask.dead, 1, m.k_scales, places ? places->row : nullptr);
      row_scales(pb.v, u.batch, u.kv_head, first, keys, mask.dead, 1, m.v_scales, places ? places->row : nullptr);
      if (pb.selects) keep_finite((char *)m.v_scales, keys, Single());
    }
    Dead dead = mask.dead;
    const Live live = live_rows<Op>(keys, dead);
    if (!live.count()) continue;
    const int64_t start = first + live.first;
    const Tile k =
        tile_rows<Op>(pb.k, u.batch, u.kv_head, start, live.count(), pb.d, nullptr, m.k, places).from(live.first);
    const bool apart = pb.spacing.apart();
    if (pb.selects && !dead) dead = (Dead)memset(m.dead, 0, (size_t)live.count());  // so that the values are copied
    Tile v = k;
    if (Op::depth == 2 || dead || !values_in_keys) {
      v = tile_columns<Op>(pb.v, u.batch, u.kv_head, start, live.count(), pb.dv_dim, dead, m.v, apart, places);
      if (pb.selects) keep_finite(m.v, column_elements<Op>(live.count(), pb.dv_dim, apart), Op());
      v = v.from(live.first / (apart ? 1 : Op::step));
    }
    for (int from = 0, to; from < keys; from = to) {
      uint32_t full[kMostLanes / 32];
      bool any = false;
      to = blocks.next(mask, from, keys, full, any);
      if (any) {
        if (!several) total.reset(lanes.count, pb.dv_dim);
        several = true;
        join_state(total, state, lanes.count, pb.dv_dim, scale.c, full);
      }
      for (int lane = 0; lane < lanes.count; lane += panel_width(lane, lanes.count)) {
        const int n = panel_width(lane, lanes.count) / W;
        const Ahead next_rows = from ? Ahead() : ahead(lane);
        if (kWide == 4 && n == 4)
          forward_panel<Op, kWide, Scored>(pb, m, state, scale, lane, k, v, places, from, to, mask, next_rows, pairs);
        else if (n == 2)
          forward_panel<Op, 2, Scored>(pb, m, state, scale, lane, k, v, places, from, to, mask, next_rows, pairs);
        else
          forward_panel<Op, 1, Scored>(pb, m, state, scale, lane, k, v, places, from, to, mask, next_rows, pairs);
      }
    }
    if (pb.selects) add_broken_values(pb, u, lanes, first, live, places, mask, state.out, m.rows);
  }
  if (several) join_state(total, state, lanes.count, pb.dv_dim, scale.c);
  return several ? total : state;
}

// Joins the blocks of one list from first to last, as sum_blocks does.
inline void forward_join(const Problem &pb, const Unit &u, const Join &join, char *block, const float *partials,
                         size_t stride) {
  const Lanes lanes = query_lanes(pb, u, join.tile);
  const ForwardMemory m(pb, lanes.count, block);
  const Running state(m.state, lanes.count, pb.dv_dim);
  state.reset(lanes.count, pb.dv_dim);
  for (int i = 0; i < join.slots; ++i) {
    const Running part(const_cast<float *>(partials) + (size_t)(join.slot + i) * stride, lanes.count, pb.dv_dim);
    join_state(state, part, lanes.count, pb.dv_dim, Scale(pb).c);
  }
  forward_finish(pb, lanes, m, state);
}

}  // namespace
}  // namespace ringweave
