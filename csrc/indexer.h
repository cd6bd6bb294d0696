// The lightning indexer: the scores of a query tile's heads against the keys of its list, and the best keys of each
// query. A score is summed over channels, then over heads, both in ascending order and fused from 0.
#pragma once
#include "contract.h"

namespace ringweave {
namespace {

constexpr int kFewQueries = 8;  // for fewer queries, the rows of a product are the heads of one query
constexpr int kDigit = 11;      // bits by which one pass of the selection sorts
constexpr int32_t kNever = INT32_MIN;  // the order of a pair that may not be chosen

struct IndexMemory {
  float *q, *k, *scores;
  PerLane<float> weights;
  char *rows;
  int32_t *order;
  uint32_t *count, *left;
  size_t bytes;
  IndexMemory(const Problem &pb, int64_t entries, char *block) {
    Carve m{block};
    const size_t queries = (size_t)smaller(pb.plan.q_tile, pb.nq), keys = (size_t)pad_lanes(pb.plan.kv_tile);
    q = m.take<float>(queries * pb.q_heads * pb.d);
    weights = {m, queries * pb.q_heads};
    k = m.take<float>(keys * pb.d);
    rows = m.take<char>((size_t)pb.d * 4 * W);
    scores = m.take<float>(queries * kWide * W);
    order = m.take<int32_t>(queries * entries * pb.plan.kv_tile + keys);
    count = m.take<uint32_t>(2 << kDigit);
    left = m.take<uint32_t>((size_t)entries * pb.plan.kv_tile + 1);
    bytes = (size_t)(m.at - block);
  }
};

// Adds the weighted products of rows, which the relu has cut, to the scores of these rows or of one query.
template <int N, class To>
RW_INLINE void score_rows(const float *q, const float *weights, int rows, int d, const float *k, To to) {
  sweep<Single, true, N>((const char *)q, 4 * d, rows, d, k, Nothing(),
                         [&](auto block, int r, auto &acc) __attribute__((always_inline)) {
#pragma GCC unroll 16
                           for (int i = 0; i < decltype(block)::value; ++i) {
                             const V weight = splat(weights[r + i]);
                             float *score = to(r + i);
#pragma GCC unroll 8
                             for (int j = 0; j < N; ++j) {
                               // max returns its second argument where it is NaN
                               const V sum = fused(weight, max(V{}, acc[i][j]), load(score + j * W));
                               store(score + j * W, sum);
                             }
                           }
                         });
}

// The scores of all queries against one panel of keys, as integers of the same order.
template <int N>
inline void score_panel(const Problem &pb, const IndexMemory &m, int queries, const float *k, const uint32_t *mask,
                        int lane, int32_t *order, int64_t width) {
  const int heads = (int)pb.q_heads, d = pb.d;
  memset(m.scores, 0, (size_t)queries * N * W * 4);
  if (queries < kFewQueries) {
    for (int i = 0; i < queries; ++i)
      score_rows<N>(m.q + (ptrdiff_t)i * heads * d, m.weights + i * heads, heads, d, k,
                    [&](int) { return m.scores + i * N * W; });
  } else {
    for (int h = 0; h < heads; ++h)
      score_rows<N>(m.q + (ptrdiff_t)h * queries * d, m.weights + h * queries, queries, d, k,
                    [&](int r) { return m.scores + r * N * W; });
  }
  const I never = I{} + kNever;
  for (int i = 0; i < queries; ++i)
    for (int j = 0; j < N; ++j) {
      const V score = load(m.scores + (i * N + j) * W) + V{};  // -0 becomes 0
      const I bits = (I)score, known = (I)(score == score);
      V ordered = (V)(((bits ^ ((bits >> 31) & INT32_MAX)) & known) | (never & ~known));
      if (mask) ordered = select(mask_at(mask + (ptrdiff_t)i * pb.plan.words, lane + j * W), ordered, (V)never);
      store(order + i * width + j * W, ordered);
    }
}

// The greatest digit such that at least `wanted` numbers have it or a greater one.
struct Digit {
  uint32_t value;
  int64_t above;  // number of numbers with a greater digit
};
RW_INLINE Digit digit_of(const uint32_t *count, uint32_t most, int64_t wanted) {
  int64_t above = 0;
  for (uint32_t digit = most;; --digit) {
    if (above + count[digit] >= wanted || !digit) return {digit, above};
    above += count[digit];
  }
}

// The least number that is chosen from a row, and how many of the numbers that equal it are chosen.
struct Least {
  int32_t order;
  int64_t room;
};

// Counts numbers by their highest digit, then those that share the least number's digit by the next one.
inline Least least_of(const IndexMemory &m, const int32_t *order, int64_t n, int64_t wanted) {
  constexpr uint32_t most = (1u << kDigit) - 1;
  constexpr int high = 32 - kDigit, middle = high - kDigit;
  uint32_t *other = m.count + most + 1;
  memset(m.count, 0, 8 * (size_t)(most + 1));
  int64_t p = 0;
  // two counts, since adjacent scores often have the same digit
  for (; p + 2 <= n; p += 2) {
    ++m.count[((uint32_t)order[p] ^ 0x80000000u) >> high];
    ++other[((uint32_t)order[p + 1] ^ 0x80000000u) >> high];
  }
  if (p < n) ++m.count[((uint32_t)order[p] ^ 0x80000000u) >> high];
  for (uint32_t i = 0; i <= most; ++i) m.count[i] += other[i];
  // kNever alone has the digit 0
  if (n - m.count[0] <= wanted) return {kNever, 0};
  const Digit first = digit_of(m.count, most, wanted);
  int64_t left = 0;
  for (p = 0; p < n; ++p) {
    const uint32_t x = (uint32_t)order[p] ^ 0x80000000u;
    m.left[left] = x;
    left += x >> high == first.value;
  }
  wanted -= first.above;
  memset(m.count, 0, 4 * (size_t)(most + 1));
  for (p = 0; p < left; ++p) ++m.count[m.left[p] >> middle & most];
  const Digit second = digit_of(m.count, most, wanted);
  wanted -= second.above;
  memset(m.count, 0, 4 * ((size_t)1 << middle));
  for (p = 0; p < left; ++p)
    if ((m.left[p] >> middle & most) == second.value) ++m.count[m.left[p] & ((1u << middle) - 1)];
  const Digit third = digit_of(m.count, (1u << middle) - 1, wanted);
  const uint32_t x = first.value << high | second.value << middle | third.value;
  return {(int32_t)(x ^ 0x80000000u), wanted - third.above};
}

// Writes the best keys of a row, ascending; of equal ones the earlier.
inline void choose_keys(const Plan &plan, const IndexMemory &m, const int32_t *col, const int32_t *order, int64_t n,
                        int64_t top_k, int32_t *index) {
  const Least least = least_of(m, order, n, top_k);
  int64_t room = least.room, chosen = 0;
  for (int64_t p = 0; p < n && chosen < top_k; ++col) {
    const int32_t first = *col * plan.kv_tile;
    const int64_t end = smaller(p + plan.kv_tile, n);
    for (int32_t key = first; p < end && chosen < top_k; ++p, ++key) {
      const bool equal = order[p] == least.order && room > 0;
      index[chosen] = key;
      room -= equal;
      chosen += equal || order[p] > least.order;
    }
  }
  // the last key was written to its place before it was known to be chosen
  for (; chosen < top_k; ++chosen) index[chosen] = -1;
}

size_t index_bytes(const Problem &pb, int64_t entries) { return IndexMemory(pb, entries, nullptr).bytes; }

// One query tile of a batch element.
void index_tile(const Problem &pb, int64_t b, int64_t tile, const Choice &choice, char *block) {
  const Plan &plan = pb.plan;
  const int64_t first = tile * plan.q_tile;
  const int queries = (int)smaller(plan.q_tile, pb.nq - first), heads = (int)pb.q_heads, d = pb.d;
  const int32_t *ends = plan.row_ptr + plan.row_set[b * heads] * (plan.q_tiles + 1) + tile;
  const int64_t entries = ends[1] - ends[0], width = entries * plan.kv_tile;
  const IndexMemory m(pb, entries, block);
  const bool few = queries < kFewQueries;
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < queries; ++i) {
      const int row = few ? i * heads + h : h * queries + i;
      widen(m.q + (ptrdiff_t)row * d, row_at(pb.q, b, h, first + i), pb.q.dtype, d);
      m.weights[row] = load1(row_at(choice.weights, b, h, first + i));
    }
  int64_t n = 0;
  for (int64_t e = 0; e < entries; ++e) {
    const int32_t column = plan.col[ends[0] + e], id = plan.mask_id[ends[0] + e];
    const int64_t k0 = (int64_t)column * plan.kv_tile;
    const int keys = (int)smaller(plan.kv_tile, pb.nk - k0);
    const Lanes lanes{b, 0, k0, 1, keys, pad_lanes(keys)};
    pack<Single>(pb.k, lanes, d, pb.scale, m.k, m.rows);
    const uint32_t *mask =
        id < 0 ? nullptr : (const uint32_t *)plan.mask_words + (ptrdiff_t)id * plan.q_tile * plan.words;
    for (int lane = 0; lane < lanes.count; lane += panel_width(lane, lanes.count)) {
      const int vectors = panel_width(lane, lanes.count) / W;
      const float *k = m.k + (ptrdiff_t)lane * d;
      int32_t *order = m.order + e * plan.kv_tile + lane;
      if (kWide == 4 && vectors == 4)
        score_panel<kWide>(pb, m, queries, k, mask, lane, order, width);
      else if (vectors == 2)
        score_panel<2>(pb, m, queries, k, mask, lane, order, width);
      else
        score_panel<1>(pb, m, queries, k, mask, lane, order, width);
    }
    n = e * plan.kv_tile + keys;
  }
  for (int i = 0; i < queries; ++i)
    choose_keys(plan, m, plan.col + ends[0], m.order + i * width, n, choice.top_k,
                choice.index + (b * pb.nq + first + i) * choice.top_k);
}

}  // namespace
}  // namespace ringweave
