// The extension module ringweave._cpu.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "check.h"
#include "run.h"

namespace ringweave {
namespace {

const std::vector<const Kernel *> &found() {
  static const std::vector<const Kernel *> list = kernels();
  return list;
}

const Kernel &pick(const std::string &variant) {
  for (const Kernel *k : found())
    if (variant.empty() || variant == k->name) return *k;
  refuse("variant", "this machine cannot run \"" + variant + "\"", "UnsupportedError");
}

void check_threads(int threads) {
  if (threads < 1 || threads > 4096) refuse("threads", "wanted 1 to 4096, got " + std::to_string(threads));
}

int head_dim(const char *name, const Array &a) {
  if (a.ndim() != 4) refuse(name, "wanted 4 dimensions (batch, head, token, channel), got " + std::to_string(a.ndim()));
  const int64_t d = (int64_t)a.shape(3);
  if (d < 8 || d > kMostChannels || d % 8)
    refuse(name, "wanted a head dimension of 8, 16, ... " + std::to_string(kMostChannels) + ", got " + std::to_string(d));
  return (int)d;
}

typedef std::optional<Array> Maybe;

// The page table as Pages, with `size` tokens per page.
Pages pages_of(const Array &table, const Array &lengths, int64_t batch, int64_t size, int64_t stored) {
  Pages pages;
  if (size < kLeastPage || size > kMostTile || size & (size - 1))
    refuse("k", "wanted pages of 16, 32, ... 256 tokens, got " + std::to_string(size));
  pages.numbers = ints("table", table, {batch, -1});
  pages.lengths = ints("lengths", lengths, {batch});
  pages.columns = (int64_t)table.shape(1);
  for (pages.shift = 0; 1 << pages.shift < size;) ++pages.shift;
  check_range("lengths", pages.lengths, batch, 0, pages.columns * size + 1);
  for (int64_t b = 0; b < batch; ++b)
    check_range("table", pages.numbers + b * pages.columns, (pages.lengths[b] + size - 1) / size, 0, stored);
  return pages;
}

// A problem with q, k, v, scale and sizes. With a table, k and v are pages; with scales, they may have 8-bit types.
Problem inputs(const Array &q, const Array &k, const Array &v, float scale, const Maybe &table = std::nullopt,
               bool scaled = false) {
  Problem pb;
  pb.d = head_dim("q", q);
  head_dim("k", k);
  pb.dv_dim = head_dim("v", v);
  pb.batch = q.shape(0), pb.q_heads = q.shape(1), pb.nq = q.shape(2);
  pb.kv_heads = k.shape(1), pb.nk = k.shape(2);
  const int64_t outer = table ? (int64_t)k.shape(0) : pb.batch, tokens = pb.nk;
  if (table && table->ndim() != 2) refuse("table", "wanted 2 dimensions, got " + std::to_string(table->ndim()));
  if (table) pb.nk *= (int64_t)table->shape(1);
  if (!pb.batch || !pb.q_heads || !pb.nq) refuse("q", "has no elements");
  if (!pb.kv_heads || !pb.nk) refuse("k", "has no elements");
  if (pb.q_heads % pb.kv_heads) refuse("k", "its number of heads must divide that of q");
  pb.q = view_of("q", q, {pb.batch, pb.q_heads, pb.nq, pb.d}, false);
  pb.k = view_of("k", k, {outer, pb.kv_heads, tokens, pb.d}, false, scaled);
  pb.v = view_of("v", v, {outer, pb.kv_heads, tokens, pb.dv_dim}, false, scaled);
  if (scaled) {
    if (pb.k.dtype != pb.v.dtype) refuse("v", "wanted the dtype of k");
    if (bytes_of(pb.k.dtype) != 1) refuse("k", "wanted 8 bits with scales");
  } else {
    same_dtype("k", pb.k.dtype, pb.q.dtype);
    same_dtype("v", pb.v.dtype, pb.q.dtype);
  }
  if (!std::isfinite(scale)) refuse("scale", "is not finite");
  pb.scale = scale;
  return pb;
}

View floats(const char *name, const Array &a, const Problem &pb, bool written) {
  View v = view_of(name, a, {pb.batch, pb.q_heads, pb.nq}, written);
  if (v.dtype != F32) refuse(name, "wanted float32");
  return v;
}

void tiles(Problem &pb, int q_tile, int kv_tile) {
  if (q_tile < 16 || q_tile > kMostTile || q_tile % 16)
    refuse("q_tile", "wanted 16, 32, ... 256, got " + std::to_string(q_tile));
  if (kv_tile < 16 || kv_tile > kMostTile || kv_tile % 16)
    refuse("kv_tile", "wanted 16, 32, ... 256, got " + std::to_string(kv_tile));
  Plan &p = pb.plan;
  p.q_tile = q_tile, p.kv_tile = kv_tile, p.words = (kv_tile + 31) / 32;
  p.q_tiles = (pb.nq + q_tile - 1) / q_tile, p.k_tiles = (pb.nk + kv_tile - 1) / kv_tile;
}

void rows_of_plan(Problem &pb, const Array &row_ptr, const Array &col, const Array &bits, const Array &masks,
                  const Array &group) {
  Plan &p = pb.plan;
  p.row_ptr = ints("row_ptr", row_ptr, {-1, p.q_tiles + 1});
  p.groups = row_ptr.shape(0);
  p.col = ints("col", col, {-1});
  const int64_t nnz = col.shape(0);
  p.bits = ints("bits", bits, {nnz});
  p.masks = ints("masks", masks, {-1, p.q_tile, p.words});
  p.group = ints("group", group, {pb.batch, pb.q_heads});
  check_offsets("row_ptr", p.row_ptr, p.groups, p.q_tiles + 1, nnz);
  check_range("col", p.col, nnz, 0, p.k_tiles);
  check_range("bits", p.bits, nnz, -1, (int64_t)masks.shape(0));
  check_range("group", p.group, pb.batch * pb.q_heads, 0, p.groups);
}

void columns_of_plan(Problem &pb, const Array &col_ptr, const Array &row, const Array &bits_t, int64_t masks) {
  Plan &p = pb.plan;
  p.col_ptr = ints("col_ptr", col_ptr, {p.groups, p.k_tiles + 1});
  p.row = ints("row", row, {-1});
  const int64_t nnz = row.shape(0);
  p.bits_t = ints("bits_t", bits_t, {nnz});
  check_offsets("col_ptr", p.col_ptr, p.groups, p.k_tiles + 1, nnz);
  check_range("row", p.row, nnz, 0, p.q_tiles);
  check_columns(p.row, p.col_ptr, p.groups, p.k_tiles + 1);
  check_range("bits_t", p.bits_t, nnz, -1, masks);
}

// (first, step, side) of a relation by residue; empty for other relations.
void space(Problem &pb, const std::vector<int64_t> &spacing) {
  if (spacing.empty()) return;
  constexpr int64_t most = (int64_t)1 << 40;  // so that positions fit in 64 bits
  const auto inside = [&](size_t i, int64_t low, int64_t high) { return spacing[i] >= low && spacing[i] <= high; };
  if (spacing.size() != 3 || !inside(0, 0, most) || !inside(1, 1, most) || !inside(2, 16, kMostTile))
    refuse("spacing", "wanted (first >= 0, step >= 1, side of 16 to 256)");
  pb.spacing = {spacing[0], spacing[1], spacing[2]};
}

// The kinds of terms, which are the same in every build.
std::vector<std::string> term_kinds() {
  std::vector<std::string> names;
  for (const TermKind *k = found()[0]->term_kinds; k->name; ++k) names.push_back(k->name);
  return names;
}

// (kind, numbers, table)
typedef std::vector<std::tuple<std::string, std::vector<float>, Maybe>> Terms;

// A term with its table as a view; strides of dimensions of size 1 are 0.
Term term_of(const Problem &pb, const std::string &kind, const std::vector<float> &numbers, const Maybe &table) {
  Term t;
  const TermKind *known = found()[0]->term_kinds;
  for (; known->name && kind != known->name; ++known) ++t.id;
  if (!known->name) {
    std::string names;
    for (const std::string &name : term_kinds()) names += (names.empty() ? "\"" : ", \"") + name + "\"";
    refuse("terms", "wanted one of " + names + ", got \"" + kind + "\"");
  }
  t.kind = known->kind;
  if ((int)numbers.size() != known->numbers)
    refuse("terms", "wanted " + std::to_string(known->numbers) + " numbers of \"" + kind + "\", got " +
                        std::to_string(numbers.size()));
  std::string got;
  for (size_t i = 0; i < numbers.size(); ++i)
    t.numbers[i] = numbers[i], got += (i ? ", " : "") + std::to_string(numbers[i]);
  if (known->takes && !known->takes(t.numbers)) refuse("terms", std::string("wanted ") + known->wanted + ", got " + got);
  if (t.kind == Term::pointwise) return t;
  if (!table) refuse(kind, "wanted a table");
  const Array &a = *table;
  t.table.data = (char *)a.data(), t.table.dtype = dtype_of(kind.c_str(), a);
  const int64_t size = bytes_of(t.table.dtype);
  auto stride = [&](size_t dim) { return a.shape(dim) == 1 ? 0 : a.stride(dim) * size; };
  if (t.kind != Term::bias && t.table.dtype != F32) refuse(kind, "wanted float32");
  if (t.kind == Term::alibi) {
    check_shape("alibi", a, {pb.q_heads});
    t.table.head = stride(0);
  } else if (t.kind == Term::distance) {
    const int64_t n = a.ndim() == 2 ? (int64_t)a.shape(1) : 0;
    check_shape("distance", a, {pb.q_heads, n | 1});
    if (n > 1 && a.stride(1) != 1) refuse(kind, "wanted stride 1 in the last dimension");
    t.table.head = stride(0), t.reach = n / 2;
  } else {
    if (a.ndim() != 4) refuse(kind, "wanted 4 dimensions (batch, head, query, key), got " + std::to_string(a.ndim()));
    check_shape("bias", a, {a.shape(0) == 1 ? 1 : pb.batch, a.shape(1) == 1 ? 1 : pb.q_heads, (int64_t)a.shape(2),
                            (int64_t)a.shape(3)});
    t.table.batch = stride(0), t.table.head = stride(1), t.table.token = stride(2), t.column = stride(3);
  }
  return t;
}

// Sets the destination of a table's gradient.
void gradient_of(Term &t, const Problem &pb, const Array &table, const Array &grad) {
  const char *name = "table_grads";
  if (t.kind == Term::distance)
    check_shape(name, grad, {pb.q_heads, 2 * t.reach + 1});
  else
    check_shape(name, grad, {(int64_t)table.shape(0), (int64_t)table.shape(1), (int64_t)table.shape(2),
                             (int64_t)table.shape(3)});
  if (dtype_of(name, grad) != F32) refuse(name, "wanted float32");
  check_compact(name, grad);
  t.grad = (float *)grad.data(), t.elements = (int64_t)grad.size();
  if (t.kind == Term::distance) {
    t.grad_head = 2 * t.reach + 1;
    return;
  }
  t.grad_batch = table.shape(0) == 1 ? 0 : grad.stride(0), t.grad_head = table.shape(1) == 1 ? 0 : grad.stride(1);
  t.grad_row = (int64_t)table.shape(3);
  t.own = (int64_t)table.shape(0) == pb.batch && (int64_t)table.shape(1) == pb.q_heads &&
          ascends(pb.scoring.rows, pb.nq) && ascends(pb.scoring.columns, pb.nk);
}

// Checks that the distance of any two positions fits in 32 bits.
void check_positions(const char *name, const int32_t *x, int64_t n, const int32_t *offset, int64_t offsets) {
  constexpr int64_t most = 1 << 29;
  check_range(name, x, n, -most, most);
  if (offset) check_range((name[0] == 'r' ? "q_offset" : "k_offset"), offset, offsets, -most, most);
}

// The arguments for terms and dropout from Python.
struct ScoringArgs {
  const Terms &terms;
  const Maybe &rows, &columns, &q_offset, &k_offset, &heads;
  int64_t drop, seed;
};

void scoring(Problem &pb, const ScoringArgs &args, std::vector<Term> &found,
             const std::vector<Maybe> &table_grads = {}) {
  Scoring &s = pb.scoring;
  if (args.drop < 0 || args.drop > 65535) refuse("drop", "wanted 0 to 65535, got " + std::to_string(args.drop));
  s.drop = (uint32_t)args.drop, s.seed = (uint64_t)args.seed;
  bool placed = s.drop > 0;
  for (const auto &[kind, numbers, table] : args.terms) {
    found.push_back(term_of(pb, kind, numbers, table));
    placed |= found.back().kind != Term::pointwise;
  }
  s.terms = found.data(), s.count = (int)found.size();
  if (!table_grads.empty() && table_grads.size() != found.size())
    refuse("table_grads", "wanted one for each term, or none");
  if (!placed) return;
  auto wanted = [&](const char *name, const Maybe &a, int64_t n) {
    if (!a) refuse(name, "wanted with alibi, distance, bias and dropout");
    return ints(name, *a, {n});
  };
  auto offset = [&](const char *name, const Maybe &a, int64_t &step) -> const int32_t * {
    if (!a) return nullptr;
    step = a->ndim() == 1 && a->shape(0) == 1 ? 0 : 1;
    return ints(name, *a, {step ? pb.batch : 1});
  };
  s.rows = wanted("rows", args.rows, pb.nq), s.columns = wanted("columns", args.columns, pb.nk);
  s.q_offset = offset("q_offset", args.q_offset, s.q_offset_step);
  s.k_offset = offset("k_offset", args.k_offset, s.k_offset_step);
  if (s.drop) s.heads = wanted("heads", args.heads, pb.q_heads);
  check_positions("rows", s.rows, pb.nq, s.q_offset, s.q_offset_step ? pb.batch : 1);
  check_positions("columns", s.columns, pb.nk, s.k_offset, s.k_offset_step ? pb.batch : 1);
  for (size_t i = 0; i < found.size(); ++i) {
    const Maybe &table = std::get<2>(args.terms[i]);
    if (found[i].kind == Term::bias) {
      check_range("rows", s.rows, pb.nq, 0, (int64_t)table->shape(2));
      check_range("columns", s.columns, pb.nk, 0, (int64_t)table->shape(3));
    }
    if (table_grads.empty() || !table_grads[i]) continue;
    if (found[i].kind == Term::pointwise || found[i].kind == Term::alibi)
      refuse("table_grads", "a term of kind \"" + std::get<0>(args.terms[i]) + "\" has none");
    gradient_of(found[i], pb, *table, *table_grads[i]);
  }
}

bool bind_forward(const Array &q, const Array &k, const Array &v, const Array &out, const Array &lse,
                  const Array &row_ptr, const Array &col, const Array &bits, const Array &masks, const Array &group,
                  int q_tile, int kv_tile, float scale, int threads, const std::string &variant, const Terms &terms,
                  const Maybe &rows, const Maybe &columns, const Maybe &q_offset, const Maybe &k_offset,
                  const Maybe &heads, int64_t drop, int64_t seed, const Maybe &table, const Maybe &lengths,
                  const Maybe &k_scale, const Maybe &v_scale, bool longest_first,
                  const std::vector<int64_t> &spacing) {
  const Kernel &kernel = pick(variant);
  check_threads(threads);
  Problem pb = inputs(q, k, v, scale, table, k_scale && v_scale);
  pb.out = view_of("out", out, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, true);
  if (pb.out.dtype != pb.q.dtype && pb.out.dtype != F32) refuse("out", "wanted the dtype of q, or float32");
  pb.lse = floats("lse", lse, pb, true);
  tiles(pb, q_tile, kv_tile);
  rows_of_plan(pb, row_ptr, col, bits, masks, group);
  space(pb, spacing);
  Pages pages;
  if (table) {
    if (!lengths) refuse("lengths", "wanted with a table");
    pages = pages_of(*table, *lengths, pb.batch, (int64_t)k.shape(2), (int64_t)k.shape(0));
    pb.k.pages = pb.v.pages = &pages;
  }
  View scales[2];
  if (k_scale && v_scale) {
    auto scales_of = [&](const char *name, const Array &a, View &of, View &to) {
      to = view_of(name, a, {(int64_t)k.shape(0), pb.kv_heads, (int64_t)k.shape(2)}, false);
      if (to.dtype != F32) refuse(name, "wanted float32");
      to.pages = of.pages, of.scales = &to;
    };
    scales_of("k_scale", *k_scale, pb.k, scales[0]);
    scales_of("v_scale", *v_scale, pb.v, scales[1]);
  }
  std::vector<Term> found;
  scoring(pb, {terms, rows, columns, q_offset, k_offset, heads, drop, seed}, found);
  int32_t below = 0;
  pb.below = &below;
  nb::gil_scoped_release release;
  forward(pb, row_work(pb, longest_first), kernel, threads);
  return below != 0;
}

void bind_tile_mass(const Array &q, const Array &k, const Array &lse, const Array &values, const Array &row_ptr,
                    const Array &col, const Array &bits, const Array &masks, const Array &group, int q_tile,
                    int kv_tile, float scale, int threads, const std::string &variant) {
  const Kernel &kernel = pick(variant);
  check_threads(threads);
  Problem pb = inputs(q, k, k, scale);
  pb.dv_dim = 0;  // there are no values
  pb.lse = floats("lse", lse, pb, false);
  tiles(pb, q_tile, kv_tile);
  rows_of_plan(pb, row_ptr, col, bits, masks, group);
  const Plan &plan = pb.plan;
  std::vector<int64_t> first;
  int64_t total = 0;
  for (int64_t i = 0; i < pb.batch * pb.q_heads; ++i) {
    const int32_t *ends = plan.row_ptr + plan.group[i] * (plan.q_tiles + 1);
    first.push_back(total);
    total += ends[plan.q_tiles] - ends[0];
  }
  const int width = values.ndim() == 2 && values.shape(1) == 1 ? 1 : q_tile;
  check_shape("values", values, {total, width});
  if (dtype_of("values", values) != F32) refuse("values", "wanted float32");
  check_compact("values", values);
  nb::gil_scoped_release release;
  tile_mass(pb, {(float *)values.data(), first.data(), width}, kernel, threads);
}

View gradient(const char *name, const Array &a, std::initializer_list<int64_t> shape, Dtype input) {
  View v = view_of(name, a, shape, true);
  if (v.dtype != input && v.dtype != F32) refuse(name, "wanted the dtype of q, or float32");
  return v;
}

void bind_backward(const Array &dout, const Array &q, const Array &k, const Array &v, const Array &lse,
                   const Array &delta, const Array &dq, const Array &dk, const Array &dv, const Array &row_ptr,
                   const Array &col, const Array &bits, const Array &col_ptr, const Array &row, const Array &bits_t,
                   const Array &masks, const Array &group, int q_tile, int kv_tile, float scale, int threads,
                   const std::string &variant, const Terms &terms, const Maybe &rows, const Maybe &columns,
                   const Maybe &q_offset, const Maybe &k_offset, const Maybe &heads, int64_t drop, int64_t seed,
                   const std::vector<Maybe> &table_grads) {
  const Kernel &kernel = pick(variant);
  check_threads(threads);
  Problem pb = inputs(q, k, v, scale);
  pb.dout = view_of("dout", dout, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, false);
  same_dtype("dout", pb.dout.dtype, pb.q.dtype);
  pb.lse = floats("lse", lse, pb, false);
  pb.delta = floats("delta", delta, pb, false);
  pb.dq = gradient("dq", dq, {pb.batch, pb.q_heads, pb.nq, pb.d}, pb.q.dtype);
  pb.dk = gradient("dk", dk, {pb.batch, pb.kv_heads, pb.nk, pb.d}, pb.q.dtype);
  pb.dv = gradient("dv", dv, {pb.batch, pb.kv_heads, pb.nk, pb.dv_dim}, pb.q.dtype);
  tiles(pb, q_tile, kv_tile);
  rows_of_plan(pb, row_ptr, col, bits, masks, group);
  columns_of_plan(pb, col_ptr, row, bits_t, (int64_t)masks.shape(0));
  std::vector<Term> found;
  scoring(pb, {terms, rows, columns, q_offset, k_offset, heads, drop, seed}, found, table_grads);
  nb::gil_scoped_release release;
  backward(pb, column_work(pb), kernel, threads);
}

// A problem with the sizes of these outputs.
Problem outputs(const char *name, const Array &a) {
  Problem pb;
  pb.dv_dim = head_dim(name, a);
  pb.batch = a.shape(0), pb.q_heads = a.shape(1), pb.nq = a.shape(2);
  return pb;
}

void bind_delta(const Array &dout, const Array &out, const std::optional<Array> &dlse, const Array &delta_, int threads,
                const std::string &variant) {
  const Kernel &kernel = pick(variant);
  check_threads(threads);
  Problem pb = outputs("dout", dout);
  pb.dout = view_of("dout", dout, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, false);
  pb.out = view_of("out", out, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, false);
  if (dlse) pb.dlse = floats("dlse", *dlse, pb, false);
  pb.delta = floats("delta", delta_, pb, true);
  nb::gil_scoped_release release;
  delta(pb, kernel, threads);
}

void bind_merge(const Array &out, const Array &lse, const Array &part, const Array &part_lse, int threads,
                const std::string &variant) {
  const Kernel &kernel = pick(variant);
  check_threads(threads);
  Problem pb = outputs("out", out);
  pb.out = view_of("out", out, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, true);
  pb.v = view_of("part", part, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, false);
  if (pb.out.dtype != F32 || pb.v.dtype != F32) refuse("out, part", "wanted float32");
  pb.lse = floats("lse", lse, pb, true);
  pb.delta = floats("part_lse", part_lse, pb, false);
  nb::gil_scoped_release release;
  merge(pb, kernel, threads);
}

// A call without terms. The constructor checks its sizes, types and plan, and divides it into work. Later calls only
// pass addresses and strides; the caller guarantees that sizes and types are those of the constructor's tensors.
class Prepared {
 public:
  Prepared(const Array &q, const Array &k, const Array &v, const Array &row_ptr, const Array &col, const Array &bits,
           const Array &masks, const Array &group, int q_tile, int kv_tile, float scale, const std::string &variant,
           const Maybe &table, int64_t keys, const std::vector<int64_t> &spacing, bool wide, bool scaled)
      : kernel(pick(variant)), pb(inputs(q, k, v, scale, table, scaled)), plan{row_ptr, col, bits, masks, group} {
    if (scaled && !table) refuse("scaled", "wanted with a table");
    if (table) {
      if (keys < 1 || keys > pb.nk) refuse("keys", "wanted 1 to " + std::to_string(pb.nk) + ", got " + std::to_string(keys));
      ints("table", *table, {pb.batch, -1});
      stored = (int64_t)k.shape(0), size = (int64_t)k.shape(2), columns_of_table = (int64_t)table->shape(1), pb.nk = keys;
      if (size < kLeastPage || size > kMostTile || size & (size - 1))
        refuse("k", "wanted pages of 16, 32, ... 256 tokens, got " + std::to_string(size));
    }
    tiles(pb, q_tile, kv_tile);
    rows_of_plan(pb, row_ptr, col, bits, masks, group);
    space(pb, spacing);
    pb.dout.dtype = pb.dq.dtype = pb.dk.dtype = pb.dv.dtype = pb.q.dtype, pb.out.dtype = wide ? F32 : pb.q.dtype;
    compact(pb.out, pb.q_heads, pb.nq, pb.dv_dim), compact(pb.dq, pb.q_heads, pb.nq, pb.d);
    compact(pb.dk, pb.kv_heads, pb.nk, pb.d), compact(pb.dv, pb.kv_heads, pb.nk, pb.dv_dim);
    for (View *of_rows : {&pb.lse, &pb.delta}) of_rows->dtype = F32, of_rows->token = 4;
    for (View *of_rows : {&pb.lse, &pb.delta}) of_rows->head = pb.nq * 4, of_rows->batch = pb.q_heads * pb.nq * 4;
    work = row_work(pb);
  }
  // Divides the call into work for backward too.
  void columns(const Array &col_ptr, const Array &row, const Array &bits_t) {
    columns_of_plan(pb, col_ptr, row, bits_t, (int64_t)plan[3].shape(0));
    plan.insert(plan.end(), {col_ptr, row, bits_t});
    work = column_work(pb);
  }
  // lse may be null if it is not requested. With pages, `table` and `lengths` are addresses, and all sequences have
  // `keys` tokens. Pages of 8 bits have contiguous scales.
  bool forward(uintptr_t q, const nb::tuple &qs, uintptr_t k, const nb::tuple &ks, uintptr_t v, const nb::tuple &vs,
               uintptr_t out, uintptr_t lse, int64_t keys, int first, int threads, uintptr_t table, uintptr_t lengths,
               uintptr_t k_scale, uintptr_t v_scale) const {
    check_threads(threads);
    // A plan without partial tiles serves all lengths with the same number of tiles. In a longer cache, the tiles from
    // `first` on move to its end.
    const int64_t later = (keys + pb.plan.kv_tile - 1) / pb.plan.kv_tile - pb.plan.k_tiles;
    if (keys < 1 || later < 0) refuse("keys", "fill fewer tiles: " + std::to_string(keys));
    Problem call = pb;
    call.nk = keys;
    Pages pages;
    if (stored) {
      pages.numbers = (const int32_t *)table, pages.lengths = (const int32_t *)lengths, pages.columns = columns_of_table;
      for (pages.shift = 0; 1 << pages.shift < size;) ++pages.shift;
      if (!table || !lengths || keys > pages.columns * size) refuse("table", "wanted with lengths that it has room for");
      check_range("lengths", pages.lengths, pb.batch, keys, keys + 1);
      for (int64_t b = 0; b < pb.batch; ++b)
        check_range("table", pages.numbers + b * pages.columns, (keys + size - 1) / size, 0, stored);
      call.k.pages = call.v.pages = &pages;
    }
    View scales[2];
    if (bytes_of(pb.k.dtype) == 1) {
      if (!k_scale || !v_scale) refuse("k_scale, v_scale", "wanted with 8 bits");
      for (View &of : scales) of.token = 4, of.head = size * 4, of.batch = pb.kv_heads * of.head, of.pages = &pages;
      scales[0].data = (char *)k_scale, call.k.scales = &scales[0];
      scales[1].data = (char *)v_scale, call.v.scales = &scales[1];
    }
    std::vector<int32_t> col;
    if (later) {
      col.assign(pb.plan.col, pb.plan.col + plan[1].shape(0));
      for (int32_t &tile : col) tile += tile < first ? 0 : (int32_t)later;
      call.plan.col = col.data(), call.plan.k_tiles += later;
    }
    place("q", call.q, q, qs), place("k", call.k, k, ks), place("v", call.v, v, vs);
    std::vector<float> unasked(lse ? 0 : (size_t)(pb.batch * pb.q_heads * pb.nq));
    call.out.data = (char *)out, call.lse.data = lse ? (char *)lse : (char *)unasked.data();
    int32_t below = 0;
    call.below = &below;
    nb::gil_scoped_release release;
    ringweave::forward(call, work, kernel, threads);
    return below != 0;
  }
  // out and lse are the results of forward; dlse is contiguous or null.
  void backward(uintptr_t dout, const nb::tuple &douts, uintptr_t q, const nb::tuple &qs, uintptr_t k,
                const nb::tuple &ks, uintptr_t v, const nb::tuple &vs, uintptr_t out, uintptr_t lse, uintptr_t dlse,
                uintptr_t dq, uintptr_t dk, uintptr_t dv, int threads) const {
    check_threads(threads);
    if (!pb.plan.col_ptr || stored) refuse("columns", "were not given");
    Problem call = pb;
    place("dout", call.dout, dout, douts);
    place("q", call.q, q, qs), place("k", call.k, k, ks), place("v", call.v, v, vs);
    call.out.data = (char *)out, call.dq.data = (char *)dq, call.dk.data = (char *)dk, call.dv.data = (char *)dv;
    nb::gil_scoped_release release;
    const int64_t rows = pb.batch * pb.q_heads * pb.nq;
    std::vector<float> lses((const float *)lse, (const float *)lse + rows), deltas((size_t)rows);
    call.delta.data = (char *)deltas.data(), call.lse.data = (char *)lses.data();
    call.dlse = pb.lse, call.dlse.data = (char *)dlse;
    delta(call, kernel, threads);
    for (int64_t i = 0; i < rows; ++i) {
      if (lses[i] == -INFINITY) deltas[i] = 0;  // a row that attends nothing has zero gradients
      if (lses[i] == INFINITY) lses[i] = NAN;   // a row with an infinite score has weights of NaN
    }
    ringweave::backward(call, work, kernel, threads);
  }

 private:
  void compact(View &v, int64_t heads, int64_t tokens, int64_t width) const {
    v.token = width * bytes_of(v.dtype), v.head = tokens * v.token, v.batch = heads * v.head;
  }
  static void place(const char *name, View &v, uintptr_t data, const nb::tuple &strides) {
    if (!data || strides.size() != 4 || nb::cast<int64_t>(strides[3]) != 1)
      refuse(name, "wanted memory, and stride 1 in the last dimension");
    const int64_t size = bytes_of(v.dtype);
    v.data = (char *)data;
    v.batch = nb::cast<int64_t>(strides[0]) * size, v.head = nb::cast<int64_t>(strides[1]) * size;
    v.token = nb::cast<int64_t>(strides[2]) * size;
  }
  const Kernel &kernel;
  Problem pb;
  std::vector<Array> plan;  // keeps the arrays alive that pb points into
  Work work;
  int64_t stored = 0, size = 0, columns_of_table = 0;  // number of pages, tokens per page, and columns of the table
};

double bind_fma_peak(const std::string &dtype, int threads, double seconds, const std::string &variant) {
  if (dtype != "float32" && dtype != "bfloat16")
    refuse("dtype", "wanted \"float32\" or \"bfloat16\", got \"" + dtype + "\"");
  if (!(seconds > 0 && seconds <= 60)) refuse("seconds", "wanted more than 0, at most 60");
  check_threads(threads);
  const Kernel &kernel = pick(variant);
  nb::gil_scoped_release release;
  return fma_peak(kernel, dtype == "bfloat16" ? BF16 : F32, threads, seconds);
}

uint64_t bind_read_all(const Array &words, int threads) {
  const nb::dlpack::dtype t = words.dtype();
  if (t.lanes != 1 || t.code != (uint8_t)nb::dlpack::dtype_code::Int || t.bits != 64) refuse("words", "wanted int64");
  check_compact("words", words);
  check_threads(threads);
  nb::gil_scoped_release release;
  return read_all((const uint64_t *)words.data(), (int64_t)words.size(), threads);
}

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const Kernel *k : found()) names.push_back(k->name);
  return names;
}

}  // namespace
}  // namespace ringweave

NB_MODULE(_cpu, m) {
  using namespace ringweave;
  using nb::literals::operator""_a;
  m.doc() = "Block-sparse attention kernels for CPUs.";
  nb::set_leak_warnings(false);  // prepared calls are cached until the process ends
  nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Refusal &refusal) {
      // imported late, since the package may be importing this module
      const nb::object kind = nb::module_::import_("ringweave.errors").attr(refusal.kind);
      PyErr_SetString(kind.ptr(), refusal.what());
    }
  });
  m.def("variants", &variants, "Instruction-set builds that this machine can run, the best first.");
  m.def("term_kinds", &term_kinds, "The kinds of score terms that the kernels compute, by name.");
  m.def("forward", &bind_forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "row_ptr"_a, "col"_a, "bits"_a, "masks"_a,
        "group"_a, "q_tile"_a, "kv_tile"_a, "scale"_a, "threads"_a, "variant"_a = "", "terms"_a = Terms(),
        "rows"_a = nb::none(), "columns"_a = nb::none(), "q_offset"_a = nb::none(), "k_offset"_a = nb::none(),
        "heads"_a = nb::none(), "drop"_a = 0, "seed"_a = 0, "table"_a = nb::none(), "lengths"_a = nb::none(),
        "k_scale"_a = nb::none(), "v_scale"_a = nb::none(), "longest_first"_a = true,
        "spacing"_a = std::vector<int64_t>(),
        "Whether an allowed score is -inf: a sum that overflowed, or an infinite input.");
  m.def("tile_mass", &bind_tile_mass, "q"_a, "k"_a, "lse"_a, "values"_a, "row_ptr"_a, "col"_a, "bits"_a, "masks"_a,
        "group"_a, "q_tile"_a, "kv_tile"_a, "scale"_a, "threads"_a, "variant"_a = "",
        "Sums of weights by tile, in the order of batch, head and list; in one column, or a column for each query.");
  m.def("backward", &bind_backward, "dout"_a, "q"_a, "k"_a, "v"_a, "lse"_a, "delta"_a, "dq"_a, "dk"_a, "dv"_a,
        "row_ptr"_a, "col"_a, "bits"_a, "col_ptr"_a, "row"_a, "bits_t"_a, "masks"_a, "group"_a, "q_tile"_a, "kv_tile"_a,
        "scale"_a, "threads"_a, "variant"_a = "", "terms"_a = Terms(), "rows"_a = nb::none(), "columns"_a = nb::none(),
        "q_offset"_a = nb::none(), "k_offset"_a = nb::none(), "heads"_a = nb::none(), "drop"_a = 0, "seed"_a = 0,
        "table_grads"_a = std::vector<Maybe>());
  m.def("delta", &bind_delta, "dout"_a, "out"_a, "dlse"_a.none(), "delta"_a, "threads"_a, "variant"_a = "",
        "Compute delta = rowsum(dout * out) - dlse, an argument of backward; dlse may be None.");
  m.def("merge", &bind_merge, "out"_a, "lse"_a, "part"_a, "part_lse"_a, "threads"_a, "variant"_a = "",
        "Merge a partial result into (out, lse) in place. A row's bits depend on nothing else.");
  nb::class_<Prepared>(m, "Prepared", "A checked call. Its methods take addresses and strides of tensors, unchecked.")
      .def(nb::init<const Array &, const Array &, const Array &, const Array &, const Array &, const Array &,
                    const Array &, const Array &, int, int, float, const std::string &, const Maybe &, int64_t,
                    const std::vector<int64_t> &, bool, bool>(),
           "q"_a, "k"_a, "v"_a, "row_ptr"_a, "col"_a, "bits"_a, "masks"_a, "group"_a, "q_tile"_a, "kv_tile"_a,
           "scale"_a, "variant"_a, "table"_a = nb::none(), "keys"_a = 0, "spacing"_a = std::vector<int64_t>(),
           "wide"_a = false, "scaled"_a = false)
      .def("columns", &Prepared::columns, "col_ptr"_a, "row"_a, "bits_t"_a)
      .def("forward", &Prepared::forward, "q"_a, "q_strides"_a, "k"_a, "k_strides"_a, "v"_a, "v_strides"_a, "out"_a,
           "lse"_a, "keys"_a, "first"_a, "threads"_a, "table"_a = 0, "lengths"_a = 0, "k_scale"_a = 0, "v_scale"_a = 0)
      .def("backward", &Prepared::backward, "dout"_a, "dout_strides"_a, "q"_a, "q_strides"_a, "k"_a, "k_strides"_a,
           "v"_a, "v_strides"_a, "out"_a, "lse"_a, "dlse"_a, "dq"_a, "dk"_a, "dv"_a, "threads"_a);
  m.def("fma_peak", &bind_fma_peak, "dtype"_a, "threads"_a, "seconds"_a, "variant"_a = "",
        "FLOP/s of a loop of multiply-adds, the peak of the machine.");
  m.def("read_all", &bind_read_all, "words"_a, "threads"_a,
        "Sum words from front to back; the time measures the speed of memory.");
}
