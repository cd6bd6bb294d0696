// What a kernel is asked to do: tensors as byte-strided views, the plan's arrays, and pieces of work.
// Plain data only: this header is shared by every instruction-set build.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ringweave {

// I8 and E4M3 (an 8-bit float) are of keys and values alone, which then have scales.
enum Dtype { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, E4M3 = 4 };

constexpr int kMostTile = 256, kMostLanes = 512, kMostChannels = 512, kLeastPage = 16;

static constexpr int bytes_of(Dtype t) { return t == F32 ? 4 : t == BF16 || t == F16 ? 2 : 1; }

// Keys and values in pages of 2^shift tokens: token t of batch element b lies in page numbers[b * columns + (t >> shift)],
// and has lengths[b] before it and after it none.
struct Pages {
  const int32_t *numbers, *lengths;
  int64_t columns;
  int shift;
};

// A (batch, head, token, channel) tensor; strides in bytes, channels adjacent. With pages it is one of (page, head, token
// of the page, channel), and `batch` leads from page to page. With scales, which are laid out alike, (batch, head, token)
// of float32, a row is what is stored times its scale.
struct View {
  char *data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
  Dtype dtype = F32;
  const Pages *pages = nullptr;
  const View *scales = nullptr;
};

struct Plan {
  const int32_t *row_ptr = nullptr, *col = nullptr, *bits = nullptr;
  const int32_t *col_ptr = nullptr, *row = nullptr, *bits_t = nullptr;
  const int32_t *masks = nullptr, *group = nullptr;
  int q_tile = 0, kv_tile = 0, words = 0;  // words: 32-bit words of one mask row
  int64_t q_tiles = 0, k_tiles = 0, groups = 0;
};

constexpr int kMostNumbers = 4;

// One term of a score. Strides of the table in bytes, those of a size of 1 being 0: alibi (head), distance (head, its
// columns adjacent), bias (batch, head, token: its rows, and `column`).
struct Term {
  // pointwise: without a table, a formula of one score
  enum Kind { pointwise, alibi, distance, bias } kind = pointwise;
  int id = 0;  // in the list of TermKind
  float numbers[kMostNumbers] = {};
  View table;
  int64_t column = 0, reach = 0;  // reach: of distances, a table has 2 reach + 1 of them
  // The table's gradient, compact, strides in elements. Where each pair has an element of its own, it is stored there;
  // else pairs add to `sums`, multiples of Scoring::quantum, and mark what is not a number in `broken`.
  float *grad = nullptr;
  int64_t grad_batch = 0, grad_head = 0, grad_row = 0, elements = 0;
  bool own = false;
  int64_t *sums = nullptr;
  uint8_t *broken = nullptr;
};

// A kind of terms, as terms.h declares it.
struct TermKind {
  const char *name;
  Term::Kind kind;
  int numbers;
  const char *wanted;             // of the numbers, in words
  bool (*takes)(const float *);   // whether numbers are such; null: there are none
  // what becomes of n scores, in place, and the slopes there unless they are null; null but for a pointwise kind
  void (*apply)(float *scores, int n, const float *numbers, float *slopes);
};

// What happens to a score between the product and the softmax, and to its weight after it. Query i of batch b has the
// position rows[i] + q_offset[b], and keys have theirs alike; the offsets may be null.
struct Scoring {
  Term *terms = nullptr;
  int count = 0;
  const int32_t *rows = nullptr, *columns = nullptr, *q_offset = nullptr, *k_offset = nullptr, *heads = nullptr;
  int64_t q_offset_step = 0, k_offset_step = 0;  // 0: one offset for all
  uint32_t drop = 0;                             // weights are dropped where 16 random bits are less
  uint64_t seed = 0;
  double quantum = 0;

  bool any() const { return count || drop; }
  float kept_factor() const { return 65536.f / (float)(65536 - drop); }
  int32_t query_at(int64_t b, int64_t i) const { return rows[i] + (q_offset ? q_offset[b * q_offset_step] : 0); }
  int32_t key_at(int64_t b, int64_t j) const { return columns[j] + (k_offset ? k_offset[b * k_offset_step] : 0); }
};

struct Problem {
  View q, k, v, out, dout, dq, dk, dv;
  View lse, delta, dlse;  // (batch, head, token), float32; dlse.data may be null
  Plan plan;
  Scoring scoring;
  int64_t batch = 0, q_heads = 0, kv_heads = 0, nq = 0, nk = 0;
  int d = 0, dv_dim = 0;
  float scale = 1;
  int32_t *below = nullptr;  // set where an allowed score is below the range of float32: forward
};

// Query heads [head, head + heads) of one batch that share a K/V head and a row set: they share every loaded tile.
struct Unit {
  int32_t batch, head, heads, kv_head;
};

// What a column's dK and dV do between the windows that visit it (see schedule.h): they start from the sums that an
// earlier visit kept, and are kept for a later one. A slot of Turns::kept goes with them.
struct Visit {
  int32_t slot = -1;
  bool resume = false, keep = false;
};

// Entries [begin, end) of the list of one tile. slot < 0: the whole list; else the partial sum to leave there, in
// forward those of its blocks (see block_end) from there on.
struct Piece {
  int32_t unit, tile, begin, end, slot;
  Visit visit;
};

// The piece that a thread sums after this one, if it is known: what it reads first is fetched ahead.
struct Next {
  const Unit *unit = nullptr;
  const Piece *piece = nullptr;
};

// Partial sums [slot, slot + slots) of one list, to be added in this order.
struct Join {
  int32_t unit, tile, slot, slots;
  Visit visit;
};

// One window of backward: the query tiles [first, first + tiles) of each head of some units, the first of them `unit`;
// and the turns in which entries of the column lists add to the dQ of their query tile.
struct Turns {
  const int32_t *rank;   // by entry of `row`: how many entries of its query tile come before
  const int32_t *total;  // (groups, query tiles)
  int32_t *done;         // (unit, head, query tile): how many have been added
  float *sums;           // as done: sum_floats each
  uint8_t *kept;         // slots of kept_bytes each
  int32_t unit, first, tiles;
};

// Where the sums of tiles go: those of a batch element and head begin at tile `first`, of `width` floats each, 1 or a
// tile's queries.
struct Mass {
  float *values;
  const int64_t *first;
  int width;
};

// One instruction-set build. Each function works on one piece with memory of its own.
struct Kernel {
  const char *name;
  size_t (*forward_bytes)(const Problem &, int lanes);
  void (*forward)(const Problem &, const Unit &, const Piece &, const Next &, char *memory, float *partials,
                  size_t stride);
  void (*forward_join)(const Problem &, const Unit &, const Join &, char *memory, const float *partials, size_t stride);
  size_t (*mass_bytes)(const Problem &, int lanes);
  void (*mass)(const Problem &, const Unit &, const Piece &, const Mass &, char *memory);
  size_t (*backward_bytes)(const Problem &, int lanes);
  void (*backward)(const Problem &, const Unit &, const Piece &, const Turns &, char *memory, float *partial);
  void (*backward_join)(const Problem &, const Unit &, const Join &, const Turns &, char *memory, const float *partials,
                        size_t stride);
  // delta of query rows [first, last) of one head
  void (*delta)(const Problem &, int64_t batch, int64_t head, int64_t first, int64_t last);
  // the largest squared length of those rows of a tensor that are finite
  double (*longest)(const View &, int width, int64_t batch, int64_t head, int64_t first, int64_t last);
  int64_t (*fma_loop)(Dtype, int64_t rounds);  // returns the FLOP done
  const TermKind *term_kinds;  // ended by one without a name
  bool (*agrees)();  // whether its two ways of adding up have the same bits on this processor; null: it has one
};

static inline void mark_below(const Problem &pb) { __atomic_store_n(pb.below, 1, __ATOMIC_RELAXED); }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
// Where the keys of a batch element end.
static inline int64_t keys_of(const Problem &pb, int64_t b) { return pb.k.pages ? pb.k.pages->lengths[b] : pb.nk; }
static inline int pad_lanes(int64_t n) { return (int)((n + 15) / 16 * 16); }

// The queries of one tile, of all heads that share its keys.
static inline int64_t tile_queries(const Problem &pb, int64_t tile) {
  return smaller(pb.plan.q_tile, pb.nq - tile * pb.plan.q_tile) * (pb.q_heads / pb.kv_heads);
}

// A row is summed in blocks of the tiles that it attends, in ascending order, each from nothing; the blocks are joined
// first to last, be it by the one thread that made them all, or from slots. Where the block ends that begins after `at`
// such tiles: its length depends on nothing else, so whoever computes the row, among whichever others, gets the same
// bits. A block is 2048 keys, and of long rows 1/32 of what comes before it.
static inline int64_t block_end(int64_t at, int64_t kv_tile) {
  int64_t length = larger(1, 2048 / kv_tile);
  while (length * 32 <= at) length *= 2;
  return at + length;
}

// The dQ of one query tile, summed in float32.
static inline int64_t sum_floats(const Problem &pb) { return (int64_t)pb.plan.q_tile * pad_lanes(pb.d); }

// What the results cannot hold of the sums of one key tile: float32 is kept where the result will be, of 16-bit results
// only the upper half.
static inline int64_t kept_bytes(const Problem &pb) {
  return (int64_t)pb.plan.kv_tile * ((pb.dk.dtype == F32 ? 0 : pb.d) + (pb.dv.dtype == F32 ? 0 : pb.dv_dim));
}

// The entries of a column of a row set whose query tiles lie in [first, last); they ascend.
struct Entries {
  int64_t begin, end;
};
static inline Entries column_entries(const Plan &plan, int64_t group, int64_t tile, int64_t first, int64_t last) {
  const int32_t *ends = plan.col_ptr + group * (plan.k_tiles + 1) + tile;
  auto find = [&](int64_t wanted) {
    int64_t low = ends[0], high = ends[1];
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (plan.row[middle] < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  return {first <= 0 ? ends[0] : find(first), last >= plan.q_tiles ? ends[1] : find(last)};
}

}  // namespace ringweave
