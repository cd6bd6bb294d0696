// Score terms on the pairs of one tile, and the gradients of their tables.
//
// Pairs are in the layout of a kernel's scores, in rows of lanes: keys by queries (of several heads) in forward, and
// queries by keys of one head in backward and in decode.h. If queries and keys are evenly spaced, a term of the
// distance has one value per diagonal of the tile, and a row of lanes is one load. Otherwise, if the tile's keys have
// several slopes, and for a bias, the values are first written in the layout of the scores.
#pragma once
#include "lanes.h"

namespace ringweave {
namespace {

constexpr int kPanelRows = 64;  // maximum number of rows in a panel

constexpr int kPastDiagonals = 16 + W;  // lanes after the last that are read: up to a multiple of 16, and in a PerLane

struct TermMemory {
  PerLane<int32_t> row_at, lane_at, index;  // index: of each lane, in the diagonals
  int32_t *distances;
  float *diagonals, *values, *biases, *slopes = nullptr, *sums;  // slopes: null in forward
  int span, panel;  // span: floats in one head's diagonals; panel: floats in a panel
  TermMemory() = default;
  // backward: also allocate slopes of pointwise terms, and sums for the tables' gradients
  TermMemory(const Problem &pb, Carve &m, int lanes, bool backward) {
    const Plan &plan = pb.plan;
    const size_t count = pb.score_terms.count, some = count > 0;
    const size_t heads = backward ? 1 : larger(1, pb.q_heads / pb.kv_heads);
    const size_t side = larger(lanes, larger(plan.q_tile, plan.kv_tile));
    span = (int)smaller(plan.q_tile, pad_lanes(pb.nq)) + plan.kv_tile + kPastDiagonals;
    panel = kPanelRows * kWide * W;
    row_at = {m, some * side}, lane_at = {m, some * side}, index = {m, some * side};
    distances = m.take<int32_t>(some * span);
    diagonals = m.take<float>(count * heads * span);
    values = m.take<float>(some * panel), biases = m.take<float>(some * panel);
    if (!backward) return;
    slopes = m.take<float>(count * panel), sums = m.take<float>(count * span);
  }
};

RW_INLINE float element(const char *p, Dtype type) {
  if (type == F32) return load1(p);
  uint16_t h;
  memcpy(&h, p, 2);
  return type == BF16 ? float_of((uint32_t)h << 16) : half_to_float(h);
}

// ---- The kinds of terms ----
// A pointwise kind is a struct with its name, the number of its parameters and a condition on them, and `operator()`,
// which returns the scores after the term. If `slope` is not null, it also writes the derivative, which is 0 where a
// score is NaN.

// s = cap tanh(s / cap). The slope is not computed as 1 - tanh^2, which cancels to 0 if the cap is far below s.
struct Softcap {
  static constexpr const char *name = "softcap", *wanted = "a softcap above 0";
  static constexpr int numbers = 1;
  static bool takes(const float *x) { return x[0] > 0 && x[0] < kInf && 1 / x[0] < kInf; }

  const V cap, shrink;
  explicit Softcap(const float *x) : cap(splat(x[0])), shrink(splat(1 / x[0])) {}
  RW_INLINE V operator()(V s, V *slope) const {
    const V x = s * shrink;
    if (slope) {
      const V e = exp2(min(x, -x) * splat(2 * kLog2e)), more = e + splat(1.f);
      *slope = max(splat(4.f) * e / (more * more), V{});
    }
    return cap * tanh(x);
  }
};

template <class Kind>
void apply_pointwise(float *s, int n, const float *numbers, float *slopes) {
  const Kind kind(numbers);
  for (int i = 0; i < n; i += W) {
    V slope = splat(kNan);  // remains NaN if the kind does not write it
    store(s + i, kind(load(s + i), slopes ? &slope : nullptr));
    if (slopes) store(slopes + i, slope);
  }
}

template <class Kind>
constexpr TermKind pointwise() {
  static_assert(Kind::numbers <= kMostNumbers, "a term has few numbers");
  return {Kind::name, Term::pointwise, Kind::numbers, Kind::wanted, Kind::takes, apply_pointwise<Kind>};
}

constexpr TermKind kTermKinds[] = {
    pointwise<Softcap>(),
    {"alibi", Term::alibi, 0, nullptr, nullptr, nullptr},
    {"distance", Term::distance, 0, nullptr, nullptr, nullptr},
    {"bias", Term::bias, 0, nullptr, nullptr, nullptr},
    {nullptr, Term::pointwise, 0, nullptr, nullptr, nullptr},
};

// Adds to an element of a table's gradient; the order of additions does not change the result.
inline void add_to(const Term &t, int64_t at, float x, double per_quantum) {
  if (!(fabsf(x) < kInf)) return __atomic_store_n(t.broken + at, 1, __ATOMIC_RELAXED);
  // clamp, since rows whose weights do not sum to 1 could exceed the bound
  const double quanta = fmin(fmax(rint(x * per_quantum), -0x1p62), 0x1p62);
  if (quanta != 0) __atomic_fetch_add(t.sums + at, (int64_t)quanta, __ATOMIC_RELAXED);
}

struct Pairs {
  const Problem &pb;
  const ScoreTerms &score_terms;
  const TermMemory &m;
  const int64_t batch;
  const bool keys_across;  // lanes are keys
  TileMask kept;           // which weights dropout keeps; without dropout, no mask
  int head = 0, heads = 1;
  int64_t row_first = 0, lane_first = 0;
  int rows = 0, lanes = 0;  // lanes: number of lanes of a head
  bool even = false;        // whether queries and keys are evenly spaced, with the same step, and keys have one slope
  bool adjacent = false;    // whether the keys have adjacent columns in a bias

  Pairs(const Problem &pb, const TermMemory &m, int64_t batch, bool keys_across)
      : pb(pb), score_terms(pb.score_terms), m(m), batch(batch), keys_across(keys_across) {}

  void set_lanes(int64_t first, int n, int count) {
    if (!score_terms.count || !score_terms.rows) return;  // pointwise terms need no positions
    lane_first = first, lanes = n;
    place(keys_across, first, n, m.lane_at);
    m.index.fill(count, [&](int l) {
      const int s = (int)smaller(l / n, heads - 1);
      return s * m.span + l - s * n;
    });
  }

  // Call this after set_lanes: it computes the diagonals.
  void set_rows(int64_t first, int n) {
    if (!score_terms.count || !score_terms.rows) return;
    row_first = first, rows = n;
    place(!keys_across, first, n, m.row_at);
    int32_t of_lanes = 0, of_rows = 0;
    even = spaced(m.lane_at, lanes, of_lanes) && spaced(m.row_at, rows, of_rows) &&
           (of_lanes == of_rows || lanes == 1 || rows == 1);
    const int32_t step = lanes == 1 ? of_rows : of_lanes;
    adjacent = true;
    const int32_t *columns = score_terms.columns + (keys_across ? lane_first : row_first);
    const int keys = keys_across ? lanes : rows;
    for (int i = 1; i < keys; ++i) adjacent &= columns[i] - columns[i - 1] == 1;
    for (int i = 0; even && i < score_terms.count; ++i) even = one_slope(score_terms.terms[i], columns, keys);
    if (!even) return;
    for (int x = 0; x < rows + lanes - 1; ++x) m.distances[x] = distance(0, 0) + sign() * step * (x - (rows - 1));
    float *to = m.diagonals;
    each_run([&](int begin, int end, bool distances, bool) {
      for (int s = 0; distances && s < heads; ++s, to += m.span) {
        memset(to, 0, 4 * (size_t)(rows + lanes - 1 + kPastDiagonals));
        lay(begin, end, head + s, columns, 0, rows + lanes - 1, to);
      }
    });
    if (m.slopes) memset(m.sums, 0, 4 * (size_t)score_terms.count * m.span);
  }

  // Applies the terms to the scores of rows [r0, r0 + n) and lanes [lane, lane + width), row by row. A product that is
  // not finite is unchanged, even if a pointwise term would make it finite.
  void apply(float *s, int r0, int n, int lane, int width) const {
    bool some = false;
    for (int i = 0; i < score_terms.count; ++i) some |= score_terms.terms[i].kind == Term::pointwise;
    V broken = V{};
    for (int i = 0; some && i < n * width; i += W) broken += load(s + i) - load(s + i);  // 0, or NaN
    if (any_below(broken == V{} ? V{} : splat(-1), 0))
      apply_broken(s, r0, n, lane, width);
    else
      apply_terms(s, r0, n, lane, width);
  }
  __attribute__((noinline)) void apply_broken(float *s, int r0, int n, int lane, int width) const {
    alignas(64) float products[kPanelRows * kWide * W];
    memcpy(products, s, 4 * (size_t)n * width);
    apply_terms(s, r0, n, lane, width);
    for (int i = 0; i < n * width; ++i)
      if (!(fabsf(products[i]) < kInf)) s[i] = products[i];
  }
  __attribute__((noinline)) void apply_terms(float *s, int r0, int n, int lane, int width) const {
    float *slopes = m.slopes;
    const float *diagonals = m.diagonals;
    int i = 0;
    auto each_alone = [&](int end) {  // applies the pointwise terms before a run, or before the end
      for (; i < end && score_terms.terms[i].kind == Term::pointwise; ++i) {
        const Term &t = score_terms.terms[i];
        kTermKinds[t.id].apply(s, n * width, t.numbers, slopes);
        if (slopes) slopes += m.panel;
      }
    };
    each_run([&](int begin, int end, bool distances, bool biases) {
      each_alone(begin);
      i = end;
      if (distances) {
        add_distances(begin, end, diagonals, s, r0, n, lane, width);
        diagonals += (ptrdiff_t)heads * m.span;
      }
      if (biases) add_biases(begin, end, s, r0, n, lane, width);
    });
    each_alone(score_terms.count);
  }

  // Converts the gradient after the terms to the gradient before them, in place, and adds the tables' gradients. The
  // lanes are keys.
  __attribute__((noinline)) void chain(float *dt, int r0, int n, int lane, int width) const {
    const float *slopes = m.slopes;
    bool tables = false;
    for (int i = 0; i < score_terms.count; ++i) {
      slopes += score_terms.terms[i].kind == Term::pointwise ? m.panel : 0;
      tables |= score_terms.terms[i].grad != nullptr;
    }
    for (int r = 0; tables && r < n; ++r)
      for (int l = filled(lane, width); l < width; ++l) dt[r * width + l] = 0;
    for (int i = score_terms.count; i-- > 0;) {
      const Term &t = score_terms.terms[i];
      if (t.kind == Term::pointwise) {
        slopes -= m.panel;
        for (int x = 0; x < n * width; x += W) store(dt + x, load(dt + x) * load(slopes + x));
      } else if (t.grad && t.kind == Term::bias) {
        bias_gradient(t, dt, r0, n, lane, width);
      } else if (t.grad) {
        distance_gradient(t, m.sums + (ptrdiff_t)i * m.span, dt, r0, n, lane, width);
      }
    }
  }

  // Adds the gradients of the whole tile to tables of distances.
  void end_rows() const {
    for (int i = 0; even && i < score_terms.count; ++i)
      if (score_terms.terms[i].grad && score_terms.terms[i].kind == Term::distance)
        scatter(score_terms.terms[i], m.sums + (ptrdiff_t)i * m.span, rows + lanes - 1);
  }

 private:
  int sign() const { return keys_across ? 1 : -1; }
  // Number of lanes of a panel that are keys; the last panel may have none.
  int filled(int lane, int width) const { return (int)larger(0, smaller(width, lanes - lane)); }
  // key - query
  int32_t distance(int row, int lane) const { return sign() * (m.lane_at[lane] - m.row_at[row]); }
  // The distances of a row and n lanes. Members are read once, since the compiler would read them for each lane.
  void set_distances(int row, int lane, int n) const {
    const int32_t *lane_at = m.lane_at + lane, at = m.row_at[row], by = sign();
    int32_t *to = m.distances;
    for (int x = 0; x < n; ++x) to[x] = by * (lane_at[x] - at);
  }

  void place(bool keys, int64_t first, int n, const PerLane<int32_t> &to) const {
    to.fill(n, [&](int i) {
      const int64_t at = first + smaller(i, n - 1);
      return keys ? score_terms.key_at(batch, at) : score_terms.query_at(batch, at);
    });
  }

  static bool spaced(const int32_t *x, int n, int32_t &step) {
    bool same = true;
    step = n > 1 ? x[1] - x[0] : 0;
    for (int i = 1; i < n; ++i) same &= x[i] - x[i - 1] == step;
    return same;
  }

  // Calls f(begin, end, has distances, has biases) for each run of additive terms.
  template <class F>
  RW_INLINE void each_run(F f) const {
    const Term *t = score_terms.terms;
    for (int i = 0; i < score_terms.count; ++i) {
      const int begin = i;
      bool distances = false, biases = false;
      for (; i < score_terms.count && t[i].kind != Term::pointwise; ++i)
        (t[i].kind == Term::bias ? biases : distances) = true;
      if (i > begin) f(begin, i, distances, biases);
    }
  }

  // Whether the keys at some columns have the same slope, for each of the heads.
  bool one_slope(const Term &t, const int32_t *columns, int keys) const {
    if (t.kind != Term::alibi || !t.column) return true;
    for (int s = 0; s < heads; ++s) {
      const char *table = t.table.data + (head + s) * t.table.head;
      const float first = load1(table + columns[0] * t.column);
      for (int i = 1; i < keys; ++i)
        if (load1(table + columns[i] * t.column) != first) return false;
    }
    return true;
  }

  // Adds a run's distance terms at the first n of m.distances. The keys of these are at columns[0], columns[step], ...;
  // with a step of 0, their slope is that of columns[0].
  void lay(int begin, int end, int h, const int32_t *columns, int step, int n, float *to) const {
    for (int i = begin; i < end; ++i) {
      const Term &t = score_terms.terms[i];
      const char *table = t.table.data + h * t.table.head;
      if (t.kind == Term::alibi && t.column == 4 && step && adjacent) {
        const float *slopes = (const float *)table + columns[0];
        for (int x = 0; x < n; ++x) to[x] = fused(-slopes[x], fabsf((float)m.distances[x]), to[x]);
      } else if (t.kind == Term::alibi && t.column && step) {
        for (int x = 0; x < n; ++x)
          to[x] = fused(-load1(table + columns[x * step] * t.column), fabsf((float)m.distances[x]), to[x]);
      } else if (t.kind == Term::alibi) {
        const float slope = load1(table + columns[0] * t.column);
        for (int x = 0; x < n; ++x) to[x] = fused(-slope, fabsf((float)m.distances[x]), to[x]);
      } else if (t.kind == Term::distance) {
        for (int x = 0; x < n; ++x) to[x] += load1(table + 4 * place_of(t, m.distances[x]));
      }
    }
  }

  static RW_INLINE int64_t place_of(const Term &t, int64_t distance) {
    return (distance < -t.reach ? -t.reach : distance > t.reach ? t.reach : distance) + t.reach;
  }

  void add_distances(int begin, int end, const float *diagonals, float *s, int r0, int n, int lane, int width) const {
    if (!even) {
      lay_pairs(begin, end, r0, n, lane, width);
      for (int i = 0; i < n * width; i += W) store(s + i, load(s + i) + load(m.values + i));
      return;
    }
    for (int l = 0; l < width; l += W) {
      const int32_t *index = m.index + lane + l;
      const bool whole = index[W - 1] - index[0] == W - 1;
      const float *from = diagonals + (rows - 1 - r0);
      for (int r = 0; r < n; ++r, --from) {
        float *to = s + r * width + l;
        store(to, load(to) + (whole ? load(from + index[0]) : gather(from, index)));
      }
    }
  }

  // Writes the distance terms of every pair of a panel, for positions that are not evenly spaced and for several slopes.
  void lay_pairs(int begin, int end, int r0, int n, int lane, int width) const {
    memset(m.values, 0, 4 * (size_t)n * width);
    for (int r = 0; r < n; ++r)
      for (int l = lane; l < lane + width && l < heads * lanes;) {
        const int s = l / lanes, some = (int)smaller((s + 1) * lanes, lane + width) - l;
        set_distances(r0 + r, l - s * lanes, some);
        const int key = keys_across ? l - s * lanes : r0 + r;
        const int32_t *columns = score_terms.columns + (keys_across ? lane_first : row_first) + key;
        lay(begin, end, head + s, columns, keys_across, some, m.values + r * width + (l - lane));
        l += some;
      }
  }

  void add_biases(int begin, int end, float *s, int r0, int n, int lane, int width) const {
    alignas(64) float one[4][kMostTile];
    const int some = filled(lane, width);
    for (int r = 0; keys_across && some && r < n; ++r) {
      memset(one[0] + some, 0, 4 * (size_t)(width - some));
      bias_row(begin, end, head, row_first + r0 + r, lane_first + lane, some, one[0]);
      for (int l = 0; l < width; l += W) store(s + r * width + l, load(s + r * width + l) + load(one[0] + l));
    }
    if (keys_across) return;
    for (int l = 0; l < width; l += 4) {
      for (int i = 0; i < 4; ++i) {
        const int at = lane + l + i;
        if (at < heads * lanes)
          bias_row(begin, end, head + at / lanes, lane_first + at % lanes, row_first + r0, n, one[i]);
        else
          memset(one[i], 0, sizeof one[i]);
      }
      for (int r = 0; r < n; r += 4)
        turn4((char *)(one[0] + r), (char *)(one[1] + r), (char *)(one[2] + r), (char *)(one[3] + r),
              (char *)(m.biases + r * width + l), 4 * (ptrdiff_t)width);
    }
    for (int i = 0; i < n * width; i += W) store(s + i, load(s + i) + load(m.biases + i));
  }

  // Writes the sum of a run's biases for one query and n keys.
  void bias_row(int begin, int end, int64_t h, int64_t query, int64_t key, int n, float *to) const {
    const int32_t *columns = score_terms.columns + key;
    float other[kMostTile], *some = to;
    for (int i = begin; i < end; ++i) {
      const Term &t = score_terms.terms[i];
      if (t.kind != Term::bias) continue;
      const char *row = row_at(t.table, batch, h, score_terms.rows[query]);
      int x = 0;
      if (adjacent && t.column == bytes_of(t.table.dtype)) {
        x = n / 8 * 8;
        widen(some, row + columns[0] * t.column, t.table.dtype, x);
      }
      for (; x < n; ++x) some[x] = element(row + columns[x] * t.column, t.table.dtype);
      for (x = 0; some != to && x < n; ++x) to[x] += some[x];
      some = other;
    }
  }

  void bias_gradient(const Term &t, const float *dt, int r0, int n, int lane, int width) const {
    const int32_t *columns = score_terms.columns + lane_first + lane;
    const int some = filled(lane, width);
    for (int r = 0; some && r < n; ++r, dt += width) {
      const int64_t row =
          batch * t.grad_batch + head * t.grad_head + score_terms.rows[row_first + r0 + r] * t.grad_row;
      if (t.own && adjacent)
        memcpy(t.grad + row + columns[0], dt, 4 * (size_t)some);
      else if (t.own)
        for (int l = 0; l < some; ++l) t.grad[row + columns[l]] = dt[l];
      else
        for (int l = 0; l < some; ++l) add_to(t, row + columns[l], dt[l], 1 / score_terms.quantum);
    }
  }

  void distance_gradient(const Term &t, float *sums, const float *dt, int r0, int n, int lane, int width) const {
    const int some = filled(lane, width);
    for (int r = 0; r < n; ++r, dt += width) {
      if (even) {
        float *to = sums + (rows - 1 - r0 - r) + lane;
        for (int l = 0; l < width; l += W) store(to + l, load(to + l) + load(dt + l));
      } else {
        set_distances(r0 + r, lane, some);
        scatter(t, dt, some);
      }
    }
  }

  // Adds n values at m.distances to a table's gradient; neighbouring values of one element are summed first.
  void scatter(const Term &t, const float *values, int n) const {
    const int64_t table = head * t.grad_head;
    for (int x = 0; x < n;) {
      const int64_t at = place_of(t, m.distances[x]);
      float sum = 0;
      for (; x < n && place_of(t, m.distances[x]) == at; ++x) sum += values[x];
      add_to(t, table + at, sum, 1 / score_terms.quantum);
    }
  }
};

}  // namespace
}  // namespace ringweave
