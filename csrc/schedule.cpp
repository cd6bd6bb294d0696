#include "schedule.h"

#include <algorithm>

namespace ringweave {
namespace {

constexpr int64_t kShares = 64;   // no piece is longer than this share of all the work ...
constexpr int64_t kShortest = 4;  // ... unless it has this few tiles
constexpr int64_t kSumBytes = 8 << 20;  // small enough for malloc to keep, and for the last level of cache
constexpr int64_t kStateFloats = 65536, kMostLanes = 512;  // a task's state stays in a 1 MiB L2 beside a K and a V tile

// One list of `length` entries, each worth `weight`, in pieces of at most `most` entries.
void add_list(Work &work, int32_t unit, int32_t tile, int64_t length, int64_t most) {
  if (length <= most) {
    work.pieces.push_back({unit, tile, 0, (int32_t)length, -1});
    return;
  }
  const int64_t parts = (length + most - 1) / most;
  work.joins.push_back({unit, tile, work.slots, (int32_t)parts});
  for (int64_t i = 0; i < parts; ++i)
    work.pieces.push_back({unit, tile, (int32_t)(length * i / parts), (int32_t)(length * (i + 1) / parts), work.slots++});
}

// Key tiles in the order of starting: from several places at once, so that columns in work at the same time seldom
// share a query tile (a window's columns share most of theirs with their neighbours) and seldom wait.
std::vector<int64_t> column_sequence(int64_t tiles) {
  constexpr int64_t places = 8;
  const int64_t apart = (tiles + places - 1) / places;
  std::vector<int64_t> sequence;
  sequence.reserve(tiles);
  for (int64_t i = 0; i < apart; ++i)
    for (int64_t t = i; t < tiles; t += apart) sequence.push_back(t);
  return sequence;
}

// dQ is summed in float32 for as many units at a time as a small share of the gradients allows, one at least.
int64_t units_at_once(const Problem &pb, int64_t units) {
  const int64_t gradients = pb.batch * (pb.q_heads * pb.nq * pb.d * bytes_of(pb.dq.dtype) + pb.kv_heads * pb.nk * pb.d * bytes_of(pb.dk.dtype) +
                                        pb.kv_heads * pb.nk * pb.dv_dim * bytes_of(pb.dv.dtype));
  return larger(1, smaller(units, larger(kSumBytes, gradients / 16) / (sum_tiles(pb) * sum_floats(pb) * 4)));
}

void longest_first(Work &work) {
  auto cost = [&](const Piece &p) { return (int64_t)(p.end - p.begin) * work.units[p.unit].heads; };
  std::stable_sort(work.pieces.begin(), work.pieces.end(), [&](const Piece &a, const Piece &b) { return cost(a) > cost(b); });
}

}  // namespace

Work row_work(const Problem &pb) {
  Work work;
  const Plan &plan = pb.plan;
  const int64_t rows = smaller(plan.q_tile, pb.nq), share = pb.q_heads / pb.kv_heads;
  const int64_t most_heads = larger(1, smaller(kMostLanes, kStateFloats / (pb.d + pb.dv_dim)) / rows);
  for (int64_t b = 0; b < pb.batch; ++b)
    for (int64_t h = 0; h < pb.q_heads;) {
      const int32_t *group = plan.group + b * pb.q_heads;
      int64_t n = 1;
      while (n < most_heads && (h + n) % share != 0 && group[h + n] == group[h]) ++n;
      work.units.push_back({(int32_t)b, (int32_t)h, (int32_t)n, (int32_t)(h / share)});
      work.lanes = (int)larger(work.lanes, pad_lanes(n * rows));
      h += n;
    }
  auto ends = [&](const Unit &u) { return plan.row_ptr + (int64_t)plan.group[u.batch * pb.q_heads + u.head] * (plan.q_tiles + 1); };
  int64_t total = 0;
  for (const Unit &u : work.units) total += (int64_t)u.heads * (ends(u)[plan.q_tiles] - ends(u)[0]);
  work.pieces.reserve(work.units.size() * plan.q_tiles);
  for (size_t i = 0; i < work.units.size(); ++i) {
    const Unit &u = work.units[i];
    const int64_t most = larger(kShortest, (total + kShares * u.heads - 1) / (kShares * u.heads));
    for (int64_t t = 0; t < plan.q_tiles; ++t) add_list(work, (int32_t)i, (int32_t)t, ends(u)[t + 1] - ends(u)[t], most);
  }
  longest_first(work);
  return work;
}

Work column_work(const Problem &pb) {
  Work work;
  const Plan &plan = pb.plan;
  const int64_t share = pb.q_heads / pb.kv_heads;
  work.lanes = pad_lanes(smaller(plan.kv_tile, pb.nk));
  auto length = [&](const Unit &u, int64_t tile, int64_t tiles) {
    int64_t n = 0;
    for (int h = u.head; h < u.head + u.heads; ++h) {
      const int32_t *ends = plan.col_ptr + (int64_t)plan.group[u.batch * pb.q_heads + h] * (plan.k_tiles + 1) + tile;
      n += ends[tiles] - ends[0];
    }
    return n;
  };
  int64_t total = 0;
  for (int64_t b = 0; b < pb.batch; ++b)
    for (int64_t h = 0; h < pb.kv_heads; ++h) {
      work.units.push_back({(int32_t)b, (int32_t)(h * share), (int32_t)share, (int32_t)h});
      total += length(work.units.back(), 0, plan.k_tiles);
    }
  const int64_t most = larger(kShortest, (total + kShares - 1) / kShares), units = (int64_t)work.units.size();
  const int64_t at_once = units_at_once(pb, units);
  work.pieces.reserve(units * plan.k_tiles);
  for (int64_t first = 0; first < units; first += at_once) {
    work.windows.push_back((int64_t)work.pieces.size());
    for (int64_t t : column_sequence(plan.k_tiles))
      for (int64_t i = first; i < smaller(first + at_once, units); ++i)
        add_list(work, (int32_t)i, (int32_t)t, length(work.units[i], t, 1), most);
  }
  work.windows.push_back((int64_t)work.pieces.size());
  work.at_once = at_once;
  return work;
}

Order column_order(const Problem &pb) {
  const Plan &plan = pb.plan;
  Order order;
  order.total.assign(plan.groups * plan.q_tiles, 0);
  int64_t entries = 0;
  for (int64_t g = 0; g < plan.groups; ++g) entries = larger(entries, plan.col_ptr[g * (plan.k_tiles + 1) + plan.k_tiles]);
  order.rank.resize(entries);
  for (int64_t g = 0; g < plan.groups; ++g) {
    const int32_t *ends = plan.col_ptr + g * (plan.k_tiles + 1);
    for (int64_t t : column_sequence(plan.k_tiles))
      for (int64_t e = ends[t]; e < ends[t + 1]; ++e) order.rank[e] = order.total[g * plan.q_tiles + plan.row[e]]++;
  }
  return order;
}

}  // namespace ringweave
