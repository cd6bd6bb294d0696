#include "run.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "processor.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace ringweave {
namespace {

struct Free {
  void operator()(void *p) const { std::free(p); }
};
template <class T>
std::unique_ptr<T, Free> block(size_t bytes) {
  void *p = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return std::unique_ptr<T, Free>((T *)p);
}

int thread_index() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// The largest length of a tensor's rows that are finite and for which used(batch element, head, row) is true.
template <class Used>
double longest(const View &t, int width, int64_t batch, int64_t heads, int64_t n, const Kernel &kernel, int threads,
               const Used &used) {
  constexpr int64_t rows = 512;  // of a task
  const int64_t parts = (n + rows - 1) / rows;
  double most = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : most)
  for (int64_t i = 0; i < batch * heads * parts; ++i) {
    const int64_t first = i % parts * rows, b = i / parts / heads, h = i / parts % heads, last = smaller(first + rows, n);
    for (int64_t begin = first, end; begin < last; begin = end + 1) {
      for (end = begin; end < last && used(b, h, end);) ++end;
      if (begin < end) most = std::fmax(most, kernel.longest(t, width, b, h, begin, end));
    }
  }
  return std::sqrt(most);
}

// Which keys any query may attend, in words like those of a mask, by row set and tile.
std::vector<uint32_t> attended(const Plan &plan, int64_t nq, int threads) {
  std::vector<uint32_t> keys(plan.row_sets * plan.k_tiles * plan.words, 0);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t tile = 0; tile < plan.row_sets * plan.k_tiles; ++tile) {
    uint32_t *mine = keys.data() + tile * plan.words;
    const int32_t *list = plan.col_ptr + tile + tile / plan.k_tiles;  // each row set has one more offset, its end
    for (int64_t e = list[0]; e < list[1]; ++e) {
      if (plan.mask_id_t[e] < 0) {
        std::fill(mine, mine + plan.words, ~0u);
        continue;
      }
      const int32_t *mask = plan.mask_words + (ptrdiff_t)plan.mask_id_t[e] * plan.q_tile * plan.words;
      const int64_t rows = smaller(plan.q_tile, nq - (int64_t)plan.row[e] * plan.q_tile);
      for (int64_t i = 0; i < rows * plan.words; ++i) mine[i % plan.words] |= (uint32_t)mask[i];
    }
  }
  return keys;
}

// Sums of the tables' gradients as integers, so that the order of additions does not change them. The weights of a
// query sum to 1, so a bound of one pair's gradient also bounds a query's sum. The quantum is 2^-61 times the bound for
// all queries.
class TableSums {
 public:
  TableSums(const Problem &pb, const Kernel &kernel, int threads) : score_terms(pb.score_terms), threads(threads) {
    size_t bytes = 0;
    each([&](Term &t) {
      each_element(t, [&](int64_t i) { t.grad[i] = 0; });
      if (!t.own) bytes += 9 * (size_t)t.elements + 64;
    });
    if (!bytes) return;
    memory = block<char>(bytes);
    char *at = memory.get();
    each([&](Term &t) {
      if (t.own) return;
      t.sums = (int64_t *)(void *)at, t.broken = (uint8_t *)at + 8 * t.elements;
      at += (9 * t.elements + 63) / 64 * 64;
      each_element(t, [&](int64_t i) { t.sums[i] = 0, t.broken[i] = 0; });
    });
    // only queries and keys that are attended count, since padding may contain numbers of any size
    const Plan &plan = pb.plan;
    const std::vector<uint32_t> keys = attended(plan, pb.nq, threads);
    const int64_t ratio = pb.q_heads / pb.kv_heads;
    auto key = [&](int64_t b, int64_t h, int64_t j) {
      const int64_t tile = j / plan.kv_tile, place = j % plan.kv_tile;
      const int32_t *row_set = plan.row_set + b * pb.q_heads + h * ratio;
      for (int64_t i = 0; i < ratio; ++i)
        if (keys[(row_set[i] * plan.k_tiles + tile) * plan.words + place / 32] >> place % 32 & 1) return true;
      return false;
    };
    auto query = [&](int64_t b, int64_t h, int64_t i) {
      float lse;
      std::memcpy(&lse, pb.lse.data + b * pb.lse.batch + h * pb.lse.head + i * pb.lse.token, 4);
      return lse != -INFINITY;
    };
    const double of_dout = longest(pb.dout, pb.dv_dim, pb.batch, pb.q_heads, pb.nq, kernel, threads, query),
                 of_v = longest(pb.v, pb.dv_dim, pb.batch, pb.kv_heads, pb.nk, kernel, threads, key),
                 of_delta = longest(pb.delta, 1, pb.batch, pb.q_heads, pb.nq, kernel, threads, query);
    const double bound = of_dout * of_v * score_terms.kept_factor() + of_delta;
    int exponent = 0;
    std::frexp(bound * (double)(pb.batch * pb.q_heads * pb.nq), &exponent);
    quantum = std::ldexp(1.0, exponent - 61);
  }
  void write() const {
    each([&](Term &t) {
      if (t.own) return;
      each_element(t, [&](int64_t i) { t.grad[i] = t.broken[i] ? NAN : (float)((double)t.sums[i] * quantum); });
    });
  }
  double quantum = 1;

 private:
  template <class F>
  void each(F f) const {
    for (int i = 0; i < score_terms.count; ++i)
      if (score_terms.terms[i].grad) f(score_terms.terms[i]);
  }
  template <class F>
  void each_element(const Term &t, F f) const {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < t.elements; ++i) f(i);
  }
  const ScoreTerms &score_terms;
  const int threads;
  std::unique_ptr<char, Free> memory;
};

constexpr double kLeastFlop = 1 << 19;  // of a thread

// Number of threads that have enough work, since starting a thread takes some microseconds. It changes no bits.
int worth(const Problem &pb, const Work &work, int64_t queries, int64_t keys, int threads) {
  const double flop = 2. * (double)work.tiles * (double)(queries * keys * (pb.d + pb.dv_dim));
  const auto pieces = (double)work.pieces.size();
  return (int)std::fmax(1, std::fmin(threads, std::fmin(pieces, flop / kLeastFlop)));
}

size_t padded(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }  // gives each thread separate pages

}  // namespace

// Computes rows again that may have become NaN by a value that they do not attend (see Problem).
static void select_values(const Problem &given, const Work &work, const Kernel &kernel, int threads) {
  Problem pb = given;
  pb.selects = true;
  const Plan &plan = pb.plan;
  const int64_t lists = (int64_t)work.units.size() * plan.q_tiles;
  const size_t bytes = padded(kernel.forward_bytes(pb, work.lanes));
  threads = (int)smaller(threads, lists);
  const auto memory = block<char>(bytes * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < lists; ++i) {
    const auto unit = (int32_t)(i / plan.q_tiles), tile = (int32_t)(i % plan.q_tiles);
    const Unit &u = work.units[unit];
    const int32_t *ends = plan.row_ptr + plan.row_set[u.batch * pb.q_heads + u.head] * (plan.q_tiles + 1) + tile;
    kernel.forward(pb, u, {unit, tile, 0, ends[1] - ends[0], -1, {}}, Next(), memory.get() + bytes * thread_index(),
                   nullptr, 0);
  }
}

static void sum_rows(const Problem &pb, const Work &work, const Kernel &kernel, int threads) {
  const int64_t pieces = (int64_t)work.pieces.size(), joins = (int64_t)work.joins.size();
  const size_t stride = (size_t)work.lanes * (pb.dv_dim + 2), bytes = padded(kernel.forward_bytes(pb, work.lanes));
  threads = worth(pb, work, smaller(pb.plan.q_tile, pb.nq), pb.plan.kv_tile, threads);
  const auto memory = block<char>(bytes * threads);
  const auto partials = block<float>(4 * stride * work.slots);
  auto sum = [&](int64_t i, int64_t then, char *mine) {
    const Piece &p = work.pieces[i];
    Next next;
    if (then < pieces && work.pieces[then].begin < work.pieces[then].end)
      next.piece = &work.pieces[then], next.unit = &work.units[next.piece->unit];
    kernel.forward(pb, work.units[p.unit], p, next, mine, partials.get(), stride);
  };
  auto join = [&](int64_t i, char *mine) {
    kernel.forward_join(pb, work.units[work.joins[i].unit], work.joins[i], mine, partials.get(), stride);
  };
  if (threads == 1) {  // saves half a microsecond for an OpenMP team of one thread
    for (int64_t i = 0; i < pieces; ++i) sum(i, i + 1, memory.get());
    for (int64_t i = 0; i < joins; ++i) join(i, memory.get());
    return;
  }
  // A thread takes its next piece before it starts the current one, to prefetch for it. It does not do so near the end,
  // where another thread may be free sooner.
  std::atomic<int64_t> taken{0};
  const int64_t known = pieces - 2 * threads;
#pragma omp parallel num_threads(threads)
  {
    char *mine = memory.get() + bytes * thread_index();
    for (int64_t i = taken++, then; i < pieces; i = then < pieces ? then : taken++) {
      then = i < known ? taken++ : pieces;
      sum(i, then, mine);
    }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < joins; ++i) join(i, mine);
  }
}

void forward(const Problem &given, const Work &work, const Kernel &kernel, int threads) {
  Problem pb = given;
  int32_t spread = 0;
  pb.spread = &spread;
  sum_rows(pb, work, kernel, threads);
  if (spread) select_values(pb, work, kernel, threads);
}

void tile_mass(const Problem &pb, const Mass &mass, const Kernel &kernel, int threads) {
  const Work work = row_work(pb);
  const int64_t pieces = (int64_t)work.pieces.size();
  const size_t bytes = padded(kernel.mass_bytes(pb, work.lanes));
  threads = (int)larger(1, smaller(threads, pieces));
  const auto memory = block<char>(bytes * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; ++i) {
    const Piece &p = work.pieces[i];
    kernel.mass(pb, work.units[p.unit], p, mass, memory.get() + bytes * thread_index());
  }
}

void choose(const Problem &pb, const Choice &choice, const Kernel &kernel, int threads) {
  struct Task {
    int64_t batch, tile, entries;
  };
  std::vector<Task> tasks;
  int64_t total = 0;
  for (int64_t b = 0; b < pb.batch; ++b)
    for (int64_t tile = 0; tile < pb.plan.q_tiles; ++tile) {
      const int32_t *ends = pb.plan.row_ptr + pb.plan.row_set[b * pb.q_heads] * (pb.plan.q_tiles + 1) + tile;
      if (ends[0] < ends[1]) tasks.push_back({b, tile, ends[1] - ends[0]}), total += ends[1] - ends[0];
    }
  if (tasks.empty()) return;
  // the longest first, so that threads end together
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task &x, const Task &y) { return x.entries > y.entries; });
  const size_t bytes = padded(kernel.index_bytes(pb, tasks[0].entries));
  const int64_t pieces = (int64_t)tasks.size(), queries = smaller(pb.plan.q_tile, pb.nq);
  const double flop = 2. * (double)total * (double)(queries * pb.plan.kv_tile * pb.q_heads * pb.d);
  threads = (int)std::fmax(1, std::fmin(smaller(threads, pieces), flop / kLeastFlop));
  const auto memory = block<char>(bytes * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; ++i)
    kernel.index(pb, tasks[i].batch, tasks[i].tile, choice, memory.get() + bytes * thread_index());
}

namespace {

constexpr int64_t kWindowBytes = 16 << 20;  // what the queries of a window keep, which the L3 cache holds
constexpr int64_t kSegment = 512;  // queries that a key sums from 0; a sum of thousands would round as often

// The ends of ranges of keys that are listed about equally often by the queries of one head.
std::vector<int64_t> even_ranges(const Problem &pb, const Unit &u, int64_t ranges) {
  std::vector<int64_t> ends{0};
  if (ranges > 1) {
    std::vector<int32_t> count(pb.tokens, 0);
    int64_t total = 0, before = 0;
    for (int64_t tile = 0; tile < pb.plan.q_tiles; ++tile) {
      const Listed list = listed(pb, u, tile);
      for (int i = 0; i < list.count; ++i) ++count[pb.k.chosen[list.first + i]];
      total += list.count;
    }
    for (int64_t n = 0; n < pb.tokens; ++n)
      if ((before += count[n]) * ranges >= total * (int64_t)ends.size() && (int64_t)ends.size() < ranges)
        ends.push_back(n + 1);
  }
  ends.push_back(pb.tokens);
  return ends;
}

}  // namespace

void backward_lists(const Problem &pb, const Kernel &kernel, int threads) {
  const Plan &plan = pb.plan;
  const int64_t share = pb.q_heads / pb.kv_heads;
  int most = 0;
  double flop = 0;
  for (int64_t i = 0; i < pb.batch * pb.q_heads; ++i)
    for (int64_t tile = 0; tile < plan.q_tiles; ++tile) {
      const int count = listed(pb, {(int32_t)(i / pb.q_heads), (int32_t)(i % pb.q_heads), 1, 0}, tile).count;
      most = count > most ? count : most, flop += 4. * count * plan.q_tile * (pb.d + pb.dv_dim);
    }
  threads = (int)std::fmax(1, std::fmin(threads, flop / kLeastFlop));
  // no bit depends on windows and ranges
  const int64_t ranges = threads > 1 ? 2 * threads : 1;
  const size_t stride = padded(kernel.kept_query_bytes(pb, most)), bytes = padded(kernel.query_bytes(pb));
  const int64_t window = smaller(plan.q_tiles, larger(kWindowBytes / (int64_t)stride, 2 * threads));
  const auto memory = block<char>(bytes * threads), kept = block<char>(stride * window);
  const int64_t of_key = pad_lanes(pb.d), of_value = pad_lanes(pb.dv_dim);
  const int64_t floats = pb.tokens * (of_key + of_value);
  const bool segments = share * plan.q_tiles > kSegment;
  const auto sum = block<float>((size_t)(4 * floats)), total = block<float>((size_t)(segments ? 4 * floats : 0));
  const auto bad = block<uint8_t>((size_t)pb.tokens);
  const ListSums sums{sum.get(), sum.get() + pb.tokens * of_key, bad.get(), most};
  const ListSums totals{total.get(), total.get() + pb.tokens * of_key, bad.get(), most};
  constexpr int64_t some = 64;  // keys of a task
  for (int64_t i = 0; i < pb.batch * pb.kv_heads; ++i) {
    Unit u{(int32_t)(i / pb.kv_heads), 0, 1, (int32_t)(i % pb.kv_heads)};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < pb.tokens; n += some) {
      kernel.begin_sums(pb, u, sums, n, smaller(n + some, pb.tokens));
      if (segments) kernel.begin_sums(pb, u, totals, n, smaller(n + some, pb.tokens));
    }
    for (int64_t h = u.kv_head * share; h < (u.kv_head + 1) * share; ++h) {
      u.head = (int32_t)h;
      const std::vector<int64_t> ends = even_ranges(pb, u, ranges);
#pragma omp parallel num_threads(threads)
      for (int64_t first = 0, last; first < plan.q_tiles; first = last) {
        last = smaller(smaller(first + window, plan.q_tiles), (first / kSegment + 1) * kSegment);
#pragma omp for schedule(dynamic, 1)
        for (int64_t tile = first; tile < last; ++tile)
          kernel.backward_query(pb, u, tile, sums, memory.get() + bytes * thread_index(),
                                kept.get() + stride * (tile - first));
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 1; r < (int64_t)ends.size(); ++r)
          kernel.backward_range(pb, u, sums, first, last, kept.get(), stride, ends[r - 1], ends[r]);
        if (!segments || (last < plan.q_tiles && last % kSegment)) continue;
#pragma omp for schedule(static)
        for (int64_t x = 0; x < floats; ++x) total.get()[x] += sum.get()[x], sum.get()[x] = 0;
      }
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < pb.tokens; n += some)
      kernel.end_sums(pb, u, segments ? totals : sums, n, smaller(n + some, pb.tokens));
  }
}

void backward(const Problem &given, const Work &work, const Kernel &kernel, int threads) {
  const TableSums tables(given, kernel, threads);
  Problem pb = given;
  pb.score_terms.quantum = tables.quantum;
  const Plan &plan = pb.plan;
  const size_t stride = (size_t)work.lanes * (pb.d + pb.dv_dim), bytes = padded(kernel.backward_bytes(pb, work.lanes));
  threads = worth(pb, work, smaller(pb.plan.q_tile, pb.nq), smaller(pb.plan.kv_tile, pb.nk), threads);
  const auto memory = block<char>(bytes * threads);
  const auto partials = block<float>(4 * stride * work.slots);
  const auto sums = block<float>((size_t)(4 * work.sums * sum_floats(pb)));
  const auto kept = block<uint8_t>((size_t)(work.kept * kept_bytes(pb)));
  std::vector<int32_t> done(pb.batch * pb.q_heads * plan.q_tiles, 0);
#pragma omp parallel num_threads(threads)
  {
    char *mine = memory.get() + bytes * thread_index();
    for (const Window &w : work.windows) {
      const Turns turns{
          work.rank.data(), work.total.data(), done.data() + w.first_sum, sums.get(), kept.get(), w.unit, w.first,
          w.tiles};
#pragma omp for schedule(monotonic : dynamic, 1)
      for (int64_t i = w.first_piece; i < w.first_piece + w.pieces; ++i) {
        const Piece &p = work.pieces[i];
        kernel.backward(pb, work.units[p.unit], p, turns, mine,
                        p.slot < 0 ? nullptr : partials.get() + stride * p.slot);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = w.first_join; i < w.first_join + w.joins; ++i) {
        const Join &join = work.joins[i];
        kernel.backward_join(pb, work.units[join.unit], join, turns, mine, partials.get(), stride);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < pb.batch * pb.q_heads * plan.q_tiles; ++i) {  // dQ = 0 for query tiles without entries
      const int64_t tile = i % plan.q_tiles, row = i / plan.q_tiles, first = tile * plan.q_tile;
      if (work.total[plan.row_set[row] * plan.q_tiles + tile]) continue;
      const View &dq = pb.dq;
      for (int64_t n = first; n < smaller(first + plan.q_tile, pb.nq); ++n)
        std::memset(dq.data + row / pb.q_heads * dq.batch + row % pb.q_heads * dq.head + n * dq.token + tile * dq.skip, 0,
                    (size_t)pb.d * bytes_of(dq.dtype));
    }
  }
  tables.write();
}

namespace {

// Calls f(batch element, head, first row, last row) for all rows of the queries.
template <class F>
void each_rows(const Problem &pb, int threads, F f) {
  constexpr int64_t rows = 512;  // of a task
  const int64_t parts = (pb.nq + rows - 1) / rows, tasks = pb.batch * pb.q_heads * parts;
  threads = (int)larger(1, smaller(threads, tasks));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < tasks; ++i) {
    const int64_t first = i % parts * rows, head = i / parts;
    f(head / pb.q_heads, head % pb.q_heads, first, smaller(first + rows, pb.nq));
  }
}

}  // namespace

void delta(const Problem &pb, const Kernel &kernel, int threads) {
  each_rows(pb, threads, [&](auto... rows) { kernel.delta(pb, rows...); });
}

void merge(const Problem &pb, const Kernel &kernel, int threads) {
  each_rows(pb, threads, [&](auto... rows) { kernel.merge(pb, rows...); });
}

// The builds that CMakeLists.txt chose: RINGWEAVE_BUILDS is X(generic)X(avx2)...
#define X(name) extern const Kernel kernel_##name;
RINGWEAVE_BUILDS
#undef X
#define X(name) &kernel_##name,
static const Kernel *const kBuilds[] = {RINGWEAVE_BUILDS};
#undef X

std::vector<const Kernel *> kernels() {
  std::vector<const Kernel *> found;
  for (const char *name : instruction_sets())
    for (const Kernel *k : kBuilds)
      if (!std::strcmp(k->name, name) && (!k->agrees || k->agrees())) found.push_back(k);
  return found;
}

}  // namespace ringweave
