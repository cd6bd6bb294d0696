#include "schedule.h"

#include <algorithm>

namespace ringweave {
namespace {

constexpr int64_t kShares = 64;              // lists longer than this share of all work, or a window's, are split ...
constexpr int64_t kShortest = 4;             // ... unless they have at most this many tiles
constexpr int64_t kSumBytes = 8 << 20;       // dQ sums of a window: malloc reuses this size, and the L3 cache holds it
constexpr int64_t kPartialBytes = 16 << 20;  // limit of forward's partial sums; fewer lists are split to stay below it
constexpr int64_t kStateFloats = 65536;  // a task's state fits a 1 MiB L2 cache together with a K and a V tile

int64_t share_of(int64_t work, int64_t shares) { return larger(kShortest, (work + shares - 1) / shares); }

// Adds a list of `length` entries as at most `parts` pieces of whole blocks, which end at `ends_of`(). The sums of the
// blocks go to the slots from `slot` on.
template <class Ends>
void add_list(Work &work, int32_t &slot, int32_t unit, int32_t tile, int64_t length, int64_t parts, Ends ends_of,
              Visit visit = {}) {
  if (parts <= 1) {
    work.pieces.push_back({unit, tile, 0, (int32_t)length, -1, visit});
    return;
  }
  const std::vector<int64_t> ends = ends_of();
  work.joins.push_back({unit, tile, slot, (int32_t)ends.size(), visit});
  int64_t begin = 0, cut = 1;
  int32_t first = slot;
  for (int64_t end : ends) {
    ++slot;
    if (end < length * cut / parts) continue;
    work.pieces.push_back({unit, tile, (int32_t)begin, (int32_t)end, first, {}});
    begin = end, first = slot;
    while (length * cut / parts <= end) ++cut;
  }
  work.slots = (int32_t)larger(work.slots, slot);
}

std::vector<int64_t> even_ends(int64_t length, int64_t parts) {
  std::vector<int64_t> ends(parts);
  for (int64_t i = 0; i < parts; ++i) ends[i] = length * (i + 1) / parts;
  return ends;
}

// The ends of a list's blocks, if every row attends a prefix of the list.
std::vector<int64_t> block_ends(int64_t length, int64_t tiles) {
  std::vector<int64_t> ends;
  for (int64_t at = 0; at < length; ends.push_back(at)) at = smaller(length, block_end(at, tiles));
  return ends;
}

// Whether every row attends a prefix of the list, so that blocks end at the same entries for all rows. Not so with a
// sliding window: the last rows of a tile do not attend its first key tile, and count from another one.
bool from_the_first(const Plan &plan, int64_t begin, int64_t end, int64_t rows) {
  std::vector<uint8_t> ended(rows, 0);
  bool any = false;
  for (int64_t e = begin; e < end; ++e) {
    if (plan.mask_id[e] < 0 && any) return false;
    if (plan.mask_id[e] < 0) continue;
    const int32_t *mask = plan.mask_words + (ptrdiff_t)plan.mask_id[e] * plan.q_tile * plan.words;
    for (int64_t r = 0; r < rows; ++r, mask += plan.words) {
      int32_t bits = 0;
      for (int w = 0; w < plan.words; ++w) bits |= mask[w];
      if (bits && ended[r]) return false;
      if (!bits) any = ended[r] = 1;
    }
  }
  return true;
}

void longest_first(Work &work) {
  auto cost = [&](const Piece &p) { return (int64_t)(p.end - p.begin) * work.units[p.unit].heads; };
  std::stable_sort(work.pieces.begin(), work.pieces.end(),
                   [&](const Piece &a, const Piece &b) { return cost(a) > cost(b); });
}

// Number of units in a window, or of query tiles of one unit: their sums need a small share of the gradients' bytes, or
// kSumBytes.
struct Extent {
  int64_t units, tiles;
};
Extent extent_of(const Problem &pb) {
  const Plan &plan = pb.plan;
  const int64_t of_keys = pb.d * bytes_of(pb.dk.dtype) + pb.dv_dim * bytes_of(pb.dv.dtype);
  const int64_t gradients =
      pb.batch * (pb.q_heads * pb.nq * pb.d * bytes_of(pb.dq.dtype) + pb.kv_heads * pb.nk * of_keys);
  const int64_t one_tile = pb.q_heads / pb.kv_heads * sum_floats(pb) * 4;
  const int64_t tiles = larger(1, larger(kSumBytes, gradients / 64) / one_tile);
  if (tiles >= plan.q_tiles) return {tiles / plan.q_tiles, plan.q_tiles};
  const int64_t parts = (plan.q_tiles + tiles - 1) / tiles;
  return {1, (plan.q_tiles + parts - 1) / parts};
}

// The key tiles that each range of query tiles attends, in the order in which their columns start. The order
// interleaves several distant places: neighbouring columns of a sliding window share most of their query tiles, so
// columns that are processed together should be far apart and then rarely wait.
std::vector<std::vector<int32_t>> column_sequences(const Plan &plan, int64_t tiles) {
  const int64_t ranges = (plan.q_tiles + tiles - 1) / tiles;
  std::vector<uint8_t> active(ranges * plan.k_tiles, 0);
  for (int64_t g = 0; g < plan.row_sets; ++g)
    for (int64_t t = 0; t < plan.k_tiles; ++t) {
      const Entries all = column_entries(plan, g, t, 0, plan.q_tiles);
      for (int64_t e = all.begin; e < all.end; ++e) active[plan.row[e] / tiles * plan.k_tiles + t] = 1;
    }
  std::vector<std::vector<int32_t>> sequences(ranges);
  for (int64_t r = 0; r < ranges; ++r) {
    std::vector<int32_t> columns;
    for (int64_t t = 0; t < plan.k_tiles; ++t)
      if (active[r * plan.k_tiles + t]) columns.push_back((int32_t)t);
    constexpr size_t places = 8;
    const size_t apart = (columns.size() + places - 1) / places;
    for (size_t i = 0; i < apart; ++i)
      for (size_t t = i; t < columns.size(); t += apart) sequences[r].push_back(columns[t]);
  }
  return sequences;
}

// Computes Turns::rank and Turns::total: for each entry, the number of entries of its query tile that start earlier.
void rank_entries(const Plan &plan, const std::vector<std::vector<int32_t>> &sequences, int64_t tiles, Work &work) {
  int64_t entries = 0;
  for (int64_t g = 0; g < plan.row_sets; ++g)
    entries = larger(entries, plan.col_ptr[g * (plan.k_tiles + 1) + plan.k_tiles]);
  work.rank.resize(entries);
  work.total.assign(plan.row_sets * plan.q_tiles, 0);
  for (int64_t g = 0; g < plan.row_sets; ++g)
    for (size_t r = 0; r < sequences.size(); ++r)
      for (int32_t t : sequences[r]) {
        const Entries some = column_entries(plan, g, t, r * tiles, (r + 1) * tiles);
        for (int64_t e = some.begin; e < some.end; ++e) work.rank[e] = work.total[g * plan.q_tiles + plan.row[e]]++;
      }
}

// Slots for sums that are kept between windows. A slot is free again after the last window that resumes it.
struct Slots {
  std::vector<int32_t> free, freed;
  int32_t count = 0;
  int32_t take() {
    if (free.empty()) return count++;
    const int32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  void end_window() {
    free.insert(free.end(), freed.begin(), freed.end());
    freed.clear();
  }
};

}  // namespace

Work row_work(const Problem &pb, bool longest) {
  Work work;
  const Plan &plan = pb.plan;
  const int64_t rows = smaller(plan.q_tile, pb.nq), share = pb.q_heads / pb.kv_heads;
  const int64_t most_heads = larger(1, smaller(kMostLanes, kStateFloats / (pb.d + pb.dv_dim)) / rows);
  for (int64_t b = 0; b < pb.batch; ++b)
    for (int64_t h = 0; h < pb.q_heads;) {
      const int32_t *row_set = plan.row_set + b * pb.q_heads;
      int64_t n = 1;
      while (n < most_heads && (h + n) % share != 0 && row_set[h + n] == row_set[h]) ++n;
      work.units.push_back({(int32_t)b, (int32_t)h, (int32_t)n, (int32_t)(h / share)});
      work.lanes = (int)larger(work.lanes, pad_lanes(n * rows));
      h += n;
    }
  auto ends = [&](const Unit &u) {
    return plan.row_ptr + (int64_t)plan.row_set[u.batch * pb.q_heads + u.head] * (plan.q_tiles + 1);
  };
  for (const Unit &u : work.units) work.tiles += (int64_t)u.heads * (ends(u)[plan.q_tiles] - ends(u)[0]);
  const int64_t total = work.tiles, block = block_tiles(pb, plan.kv_tile);
  // calls use(unit, query tile, length, pieces) for every list; no piece of several blocks is much longer than a share
  auto each_list = [&](int64_t shares, auto use) {
    for (size_t i = 0; i < work.units.size(); ++i) {
      const Unit &u = work.units[i];
      const int64_t most = share_of((total + u.heads - 1) / u.heads, shares);
      for (int64_t t = 0; t < plan.q_tiles; ++t) {
        const int64_t begin = ends(u)[t], n = ends(u)[t + 1] - begin;
        const int64_t queries = smaller(plan.q_tile, pb.nq - t * plan.q_tile);
        // in a view, a tile may belong to two blocks
        const bool one = pb.spacing.apart() || n <= most || n <= block_end(0, block) ||
                         !from_the_first(plan, begin, begin + n, queries);
        use((int32_t)i, (int32_t)t, n, one ? 1 : (n + most - 1) / most);
      }
    }
  };
  auto partial_bytes = [&](int64_t shares) {
    int64_t slots = 0;
    each_list(shares, [&](int32_t, int32_t, int64_t n, int64_t parts) {
      if (parts > 1) slots += (int64_t)block_ends(n, block).size();
    });
    return slots * work.lanes * pb.dv_dim * 4;
  };
  int64_t shares = kShares;
  while (partial_bytes(shares) > kPartialBytes) shares /= 2;  // ends, since with one share no list is split
  work.pieces.reserve(work.units.size() * plan.q_tiles);
  int32_t slot = 0;
  each_list(shares, [&](int32_t unit, int32_t tile, int64_t n, int64_t parts) {
    add_list(work, slot, unit, tile, n, parts, [&] { return block_ends(n, block); });
  });
  if (longest) longest_first(work);
  return work;
}

Work column_work(const Problem &pb) {
  Work work;
  const Plan &plan = pb.plan;
  const int64_t heads = pb.q_heads / pb.kv_heads, units = pb.batch * pb.kv_heads;
  const Extent extent = extent_of(pb);
  const auto sequences = column_sequences(plan, extent.tiles);
  rank_entries(plan, sequences, extent.tiles, work);
  work.lanes = pad_lanes(smaller(plan.kv_tile, pb.nk));
  for (int64_t i = 0; i < units; ++i) {
    const int64_t kv_head = i % pb.kv_heads;
    work.units.push_back({(int32_t)(i / pb.kv_heads), (int32_t)(kv_head * heads), (int32_t)heads, (int32_t)kv_head});
  }
  auto length = [&](int64_t unit, int64_t tile, int64_t range) {
    const Unit &u = work.units[unit];
    int64_t n = 0;
    for (int h = u.head; h < u.head + u.heads; ++h) {
      const int64_t g = plan.row_set[u.batch * pb.q_heads + h];
      const Entries some = column_entries(plan, g, tile, range * extent.tiles, (range + 1) * extent.tiles);
      n += some.end - some.begin;
    }
    return n;
  };
  Slots kept;
  int64_t sums = 0;
  for (int64_t first = 0; first < units; first += extent.units) {
    const int64_t last = smaller(units, first + extent.units);
    // for each unit and column: number of windows that visit it, number of visits so far, and its slot between windows
    std::vector<int32_t> visits((last - first) * plan.k_tiles, 0), passed(visits), slots(visits);
    for (size_t r = 0; r < sequences.size(); ++r)
      for (int32_t t : sequences[r])
        for (int64_t i = first; i < last; ++i) visits[(i - first) * plan.k_tiles + t] += length(i, t, r) > 0;
    for (size_t r = 0; r < sequences.size(); ++r) {
      const int64_t tiles = smaller(extent.tiles, plan.q_tiles - r * extent.tiles);
      Window window{(int64_t)work.pieces.size(),
                    0,
                    (int64_t)work.joins.size(),
                    0,
                    sums,
                    (int32_t)first,
                    (int32_t)(r * extent.tiles),
                    (int32_t)tiles};
      sums += (last - first) * heads * tiles;
      work.sums = larger(work.sums, (last - first) * heads * tiles);
      int64_t total = 0;
      for (int32_t t : sequences[r])
        for (int64_t i = first; i < last; ++i) total += length(i, t, r);
      const int64_t most = share_of(total, kShares);
      work.tiles += total;
      int32_t slot = 0;
      for (int32_t t : sequences[r])
        for (int64_t i = first; i < last; ++i) {
          const int64_t n = length(i, t, r), at = (i - first) * plan.k_tiles + t;
          if (!n) continue;
          Visit visit;
          visit.resume = passed[at] > 0, visit.keep = ++passed[at] < visits[at];
          if (visit.keep && !visit.resume) slots[at] = kept.take();
          if (visit.resume && !visit.keep) kept.freed.push_back(slots[at]);
          visit.slot = slots[at];
          const int64_t parts = (n + most - 1) / most;
          add_list(work, slot, (int32_t)i, t, n, parts, [&] { return even_ends(n, parts); }, visit);
        }
      if (r == 0)  // columns that no query attends have gradients of zero
        for (int64_t i = first; i < last; ++i)
          for (int64_t t = 0; t < plan.k_tiles; ++t)
            if (!visits[(i - first) * plan.k_tiles + t]) add_list(work, slot, (int32_t)i, (int32_t)t, 0, 1, [] { return std::vector<int64_t>(); });
      kept.end_window();
      window.pieces = (int64_t)work.pieces.size() - window.first_piece;
      window.joins = (int64_t)work.joins.size() - window.first_join;
      if (window.pieces) work.windows.push_back(window);
    }
  }
  work.kept = kept.count;
  return work;
}

}  // namespace ringweave
