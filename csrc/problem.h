// The input of a kernel: tensors as byte-strided views, the plan's arrays, and pieces of work.
// Only plain data, since all instruction-set builds share this header.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ringweave {

// I8 and E4M3 (an 8-bit float) are only for keys and values, which then have scales.
enum Dtype { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, E4M3 = 4 };

constexpr int kMostTile = 256, kMostLanes = 512, kMostChannels = 640, kLeastPage = 16;

static constexpr int bytes_of(Dtype t) { return t == F32 ? 4 : t == BF16 || t == F16 ? 2 : 1; }

// Keys and values in pages of 2^shift tokens. Batch element b has lengths[b] tokens; token t is in page
// numbers[b * columns + (t >> shift)].
struct Pages {
  const int32_t *numbers, *lengths;
  int64_t columns;
  int shift;
};

// A (batch, head, token, channel) tensor with strides in bytes and adjacent channels. With pages, its dimensions are
// (page, head, token in the page, channel), and `batch` is the stride over pages. With scales, a row is the stored
// codes times its scale; the scales are float32 (batch, head, token) in the same layout. The rows of query tile n are
// `skip` n bytes further than the strides say: where heads are the rows of a tile, `token` is the stride over these heads,
// and the tiles are a query apart.
struct View {
  char *data = nullptr;
  int64_t batch = 0, head = 0, token = 0, skip = 0;
  Dtype dtype = F32;
  const Pages *pages = nullptr;
  const View *scales = nullptr;
  const int32_t *chosen = nullptr;  // token n of the kernel is token chosen[n]; null: all tokens, in order
};

struct Plan {
  const int32_t *row_ptr = nullptr, *col = nullptr, *mask_id = nullptr;
  const int32_t *col_ptr = nullptr, *row = nullptr, *mask_id_t = nullptr;
  const int32_t *mask_words = nullptr, *row_set = nullptr;
  int q_tile = 0, kv_tile = 0, words = 0;  // words: number of 32-bit words in a mask row
  int64_t q_tiles = 0, k_tiles = 0, row_sets = 0, masks = 0, entries = 0;
};

// The keys of a relation by residue (see Spacing in plan/branches.py): key n of the view is token first + step * n of
// the whole, and `side` tokens are a key tile of the whole. Sums over the keys of a view are cut at the same tokens as
// sums over the whole. So both have the same bits, since keys that a row does not attend add 0. step == 0: no relation
// by residue; step == 1: such a relation in token order.
struct Spacing {
  int64_t first = 0, step = 0, side = 0;
  bool apart() const { return step > 1; }
};

constexpr int kMostNumbers = 4;

// One term of a score. The table's strides are in bytes, and 0 for dimensions of size 1: alibi uses (head) and, with a
// slope for each key, `column`; distance (head) with adjacent columns; and bias (batch, head, token) for its rows and
// `column`.
struct Term {
  // pointwise: a formula of one score, without a table
  enum Kind { pointwise, alibi, distance, bias } kind = pointwise;
  int id = 0;  // index in the list of TermKind
  float numbers[kMostNumbers] = {};
  View table;
  int64_t column = 0, reach = 0;  // reach: a table of distances has 2 reach + 1 columns
  // The table's gradient, contiguous, with strides in elements. If each pair has a separate element (`own`), the
  // gradient is stored there. Otherwise pairs add integer multiples of ScoreTerms::quantum to `sums`, and gradients
  // that are not finite are marked in `broken`.
  float *grad = nullptr;
  int64_t grad_batch = 0, grad_head = 0, grad_row = 0, elements = 0;
  bool own = false;
  int64_t *sums = nullptr;
  uint8_t *broken = nullptr;
};

// A kind of terms, declared in terms.h.
struct TermKind {
  const char *name;
  Term::Kind kind;
  int numbers;
  const char *wanted;             // the condition on the numbers, in words
  bool (*takes)(const float *);   // whether numbers fulfil the condition; null without numbers
  // applies the term to n scores in place, and writes the slopes unless null; null unless the kind is pointwise
  void (*apply)(float *scores, int n, const float *numbers, float *slopes);
};

// The operations on a score between product and softmax, and on its weight afterwards. Query i of batch element b has
// position rows[i] + q_offset[b], and key j has position columns[j] + k_offset[b]; the offsets may be null.
struct ScoreTerms {
  Term *terms = nullptr;
  int count = 0;
  const int32_t *rows = nullptr, *columns = nullptr, *q_offset = nullptr, *k_offset = nullptr, *heads = nullptr;
  int64_t q_offset_step = 0, k_offset_step = 0;  // 0: one offset for all batch elements
  uint32_t drop = 0;                             // weights are dropped where 16 random bits are less than this
  uint64_t seed = 0;
  double quantum = 0;

  bool any() const { return count || drop; }
  float kept_factor() const { return 65536.f / (float)(65536 - drop); }
  int32_t query_at(int64_t b, int64_t i) const { return rows[i] + (q_offset ? q_offset[b * q_offset_step] : 0); }
  int32_t key_at(int64_t b, int64_t j) const { return columns[j] + (k_offset ? k_offset[b * k_offset_step] : 0); }
};

struct Problem {
  // Outputs and inputs of queries are tensors of `group` times as many heads: each query tile has the rows of one query, a
  // row for each head of a group.
  int group = 1;
  View q, k, v, out, dout, dq, dk, dv;
  View lse, delta, dlse;  // (batch, head, token), float32; dlse.data may be null
  Plan plan;
  Spacing spacing;
  ScoreTerms score_terms;
  int64_t batch = 0, q_heads = 0, kv_heads = 0, nq = 0, nk = 0;
  int64_t tokens = 0;  // with chosen keys: number of all keys, where nk counts the chosen ones
  int d = 0, dv_dim = 0;
  float scale = 1;
  int32_t *below = nullptr;  // forward sets it if an allowed score is below the range of float32
  // The product P V multiplies a value that some row of a tile attends with the weights of all rows, and 0 * NaN is NaN.
  // Forward sets `spread` if a row may have become NaN in this way. With `selects`, it computes such rows again: elements
  // of V that are not finite are 0 in the product, and are added to the rows that attend them.
  int32_t *spread = nullptr;
  bool selects = false;
};

// Query heads [head, head + heads) of a batch element that share a K/V head and a row set, and so every loaded tile.
struct Unit {
  int32_t batch, head, heads, kv_head;
};

// How a window's visit to a column (see schedule.h) continues dK and dV: whether it starts from the sums of an earlier
// visit (resume), and whether it keeps them for a later one (keep). `slot` is an index of Turns::kept.
struct Visit {
  int32_t slot = -1;
  bool resume = false, keep = false;
};

// Entries [begin, end) of the list of one tile. If slot < 0, they are the whole list. Otherwise the partial sum goes
// to this slot; in forward, the sums of the blocks (see block_end) go to the slots from it on.
struct Piece {
  int32_t unit, tile, begin, end, slot;
  Visit visit;
};

// The piece that a thread processes after the current one, if known, so that its first tile can be prefetched.
struct Next {
  const Unit *unit = nullptr;
  const Piece *piece = nullptr;
};

// Partial sums [slot, slot + slots) of one list, which are added in this order.
struct Join {
  int32_t unit, tile, slot, slots;
  Visit visit;
};

// One window of backward: the query tiles [first, first + tiles) of each head of several units, the first of which is
// `unit`; and the order (turns) in which entries of the column lists add to the dQ of their query tile.
struct Turns {
  const int32_t *rank;   // for each entry of `row`: the number of earlier entries of its query tile
  const int32_t *total;  // number of entries, (row sets, query tiles)
  int32_t *done;         // number of entries added so far, (unit, head, query tile)
  float *sums;           // dQ sums in the order of `done`, sum_floats each
  uint8_t *kept;         // slots of kept_bytes each
  int32_t unit, first, tiles;
};

// The sums of backward over packed keys, for one head of keys: dK and dV in float32, rows padded to 16 channels; and which
// keys are not finite. No list has more than `most` keys.
struct ListSums {
  float *keys, *values;
  uint8_t *bad;
  int most;
};

// Destination of the sums of weights. Each tile has `width` floats: 1, or one per query of a tile. `first` has the
// index of the first tile of each batch element and head.
struct Mass {
  float *values;
  const int64_t *first;
  int width;
};

// The lightning indexer's weights of queries and heads, float32, and the chosen keys: (batch, query, top_k).
struct Choice {
  View weights;
  int32_t *index;
  int64_t top_k;
};

// The functions of one instruction-set build. Each processes one piece with separate scratch memory.
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
  // Backward of packed keys, see backward_lists.h: bytes that a query keeps, and of the scratch memory; the two phases,
  // for a query and for the keys [from, to) over the window [first, last); the beginning and the end of the sums.
  size_t (*kept_query_bytes)(const Problem &, int most);
  size_t (*query_bytes)(const Problem &);
  void (*backward_query)(const Problem &, const Unit &, int64_t tile, const ListSums &, char *memory, char *kept);
  void (*backward_range)(const Problem &, const Unit &, const ListSums &, int64_t first, int64_t last, char *kept,
                         size_t stride, int64_t from, int64_t to);
  void (*begin_sums)(const Problem &, const Unit &, const ListSums &, int64_t from, int64_t to);
  void (*end_sums)(const Problem &, const Unit &, const ListSums &, int64_t from, int64_t to);
  // computes delta for query rows [first, last) of one head
  void (*delta)(const Problem &, int64_t batch, int64_t head, int64_t first, int64_t last);
  // merges query rows [first, last) of a part, (v, delta), into (out, lse); all are float32
  void (*merge)(const Problem &, int64_t batch, int64_t head, int64_t first, int64_t last);
  // returns the largest squared length of the finite rows of a tensor
  double (*longest)(const View &, int width, int64_t batch, int64_t head, int64_t first, int64_t last);
  size_t (*index_bytes)(const Problem &, int64_t entries);
  // chooses the keys of the queries of one tile
  void (*index)(const Problem &, int64_t batch, int64_t tile, const Choice &, char *memory);
  const TermKind *term_kinds;  // the last element has no name
  bool (*agrees)();  // whether the build's two ways of summing have the same bits on this processor; null if it has one
};

static inline void mark(int32_t *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

static inline constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
// Number of keys of a batch element.
static inline int64_t keys_of(const Problem &pb, int64_t b) {
  return pb.k.pages && !pb.k.chosen ? pb.k.pages->lengths[b] : pb.nk;
}
static inline int pad_lanes(int64_t n) { return (int)((n + 15) / 16 * 16); }

// Number of queries in one tile, over all heads that share its keys.
static inline int64_t tile_queries(const Problem &pb, int64_t tile) {
  return smaller(pb.plan.q_tile, pb.nq - tile * pb.plan.q_tile) * (pb.q_heads / pb.kv_heads);
}

// Tiles of `side` keys in a block of few tiles. Packed keys are few, and reading them is slow, so that several threads
// should share a row of them.
static inline int64_t block_tiles(const Problem &pb, int64_t side) {
  return larger(1, (pb.k.chosen ? 512 : 2048) / side);
}

// A row is summed in blocks of the tiles that it attends, in ascending order. Each block starts from 0, and the blocks
// are joined from first to last, whether one thread computed them all or several threads left them in slots. Returns
// the end of the block that begins after `at` tiles. The end depends on nothing else, so a row has the same bits
// whichever thread computes it, and together with whichever other rows. A block has block_tiles(), or in long rows about
// 1/32 of the tiles before it.
static inline int64_t block_end(int64_t at, int64_t length) {
  while (length * 32 <= at) length *= 2;
  return at + length;
}

// Number of floats in the float32 sum of one query tile's dQ.
static inline int64_t sum_floats(const Problem &pb) { return (int64_t)pb.plan.q_tile * pad_lanes(pb.d); }

// Bytes of a key tile's float32 sums that do not fit in dK and dV between windows. A float32 result holds its sums
// completely; a 16-bit result holds only their upper halves.
static inline int64_t kept_bytes(const Problem &pb) {
  return (int64_t)pb.plan.kv_tile * ((pb.dk.dtype == F32 ? 0 : pb.d) + (pb.dv.dtype == F32 ? 0 : pb.dv_dim));
}

// The entries of a column of a row set with query tiles in [first, last); the query tiles ascend.
struct Entries {
  int64_t begin, end;
};
static inline Entries column_entries(const Plan &plan, int64_t row_set, int64_t tile, int64_t first, int64_t last) {
  const int32_t *ends = plan.col_ptr + row_set * (plan.k_tiles + 1) + tile;
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

// The keys of a query that are packed: `count` of Problem's chosen keys from `first` on, ascending.
struct Listed {
  int64_t first;
  int count;
  // Number of these keys before a key.
  int before(const Problem &pb, int64_t key) const {
    const int32_t *keys = pb.k.chosen + first;
    int low = 0, high = count;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (keys[middle] < key)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};
static inline Listed listed(const Problem &pb, const Unit &u, int64_t tile) {
  const Plan &plan = pb.plan;
  const int32_t *ends = plan.row_ptr + (int64_t)plan.row_set[u.batch * pb.q_heads + u.head] * (plan.q_tiles + 1) + tile;
  int count = (ends[1] - ends[0]) * plan.kv_tile;
  if (count && plan.mask_id[ends[1] - 1] >= 0) {  // the first keys of the last tile
    const int32_t *mask = plan.mask_words + (ptrdiff_t)plan.mask_id[ends[1] - 1] * plan.q_tile * plan.words;
    count -= plan.kv_tile;
    for (int w = 0; w < plan.words; ++w) count += __builtin_popcount((uint32_t)mask[w]);
  }
  return {(int64_t)ends[0] * plan.kv_tile, count};
}

}  // namespace ringweave
