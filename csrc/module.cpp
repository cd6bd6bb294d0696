// The extension module ringweave._cpu.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "build.h"
#include "check.h"
#include "run.h"
#include "step.h"

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

// The arguments of a call, which Python passes by name.
class Arguments {
 public:
  explicit Arguments(const nb::kwargs &given) {
    named.reserve(given.size());
    for (const auto &[name, value] : given) named.push_back({nb::cast<const char *>(name), value});
  }
  template <class T>
  T get(const char *name) {
    const nb::handle found = find(name);
    if (found.is_none()) refuse(name, "is missing");
    return cast<T>(name, found);
  }
  template <class T>
  T get(const char *name, T otherwise) {
    const nb::handle found = find(name);
    return found.is_none() ? otherwise : cast<T>(name, found);
  }
  Array array(const char *name) { return get<Array>(name); }
  Maybe maybe(const char *name) { return get<Maybe>(name, Maybe()); }
  // An array that a prepared call reads later, too.
  Array keep(const char *name) { return kept.emplace_back(array(name)); }
  // Refuses names that nothing has asked for.
  void end() const {
    for (const Named &each : named)
      if (!each.asked) refuse(each.name, "is no argument of this function");
  }
  std::vector<Array> kept;

 private:
  struct Named {
    const char *name;
    nb::handle value;
    bool asked = false;
  };
  // None if the argument is not given.
  nb::handle find(const char *name) {
    for (Named &each : named)
      if (each.name[0] == name[0] && !std::strcmp(each.name, name)) return each.asked = true, each.value;
    return nb::none();
  }
  template <class T>
  static T cast(const char *name, nb::handle found) {
    T value;
    if (!nb::try_cast(found, value)) refuse(name, "has a wrong type");
    return value;
  }
  std::vector<Named> named;
};

const Kernel &pick(Arguments &given) { return pick(given.get<std::string>("variant", "")); }

int threads_of(Arguments &given) {
  const int threads = given.get<int>("threads");
  check_threads(threads);
  return threads;
}

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

// Makes the heads of each group the rows of a query's tile, in a view of (batch, head, query).
void heads_as_rows(View &v, int group) {
  if (group == 1) return;
  const int64_t head = v.head, query = v.token;
  v.head = group * head, v.token = head, v.skip = query - group * head;
}

// A tensor of queries, (batch, heads, queries[, width]).
View queries_of(const char *name, const Array &a, const Problem &pb, int64_t width, bool written) {
  const int64_t heads = pb.q_heads * pb.group, queries = pb.nq / pb.group;
  View v = width ? view_of(name, a, {pb.batch, heads, queries, width}, written)
                 : view_of(name, a, {pb.batch, heads, queries}, written);
  heads_as_rows(v, pb.group);
  return v;
}

// A problem with q, k, v, scale and sizes. With a table, k and v are pages; with scales, they may have 8-bit types.
Problem inputs(Arguments &given, const char *values = "v", bool scaled = false, int group = 1) {
  const Array q = given.array("q"), k = given.array("k"), v = given.array(values);
  const Maybe table = given.maybe("table");
  const float scale = given.get<float>("scale");
  Problem pb;
  pb.d = head_dim("q", q);
  head_dim("k", k);
  pb.dv_dim = head_dim(values, v);
  pb.batch = q.shape(0), pb.q_heads = q.shape(1), pb.nq = q.shape(2);
  pb.kv_heads = k.shape(1), pb.nk = k.shape(2);
  const int64_t outer = table ? (int64_t)k.shape(0) : pb.batch, tokens = pb.nk;
  if (table && table->ndim() != 2) refuse("table", "wanted 2 dimensions, got " + std::to_string(table->ndim()));
  if (table) pb.nk *= (int64_t)table->shape(1);
  if (!pb.batch || !pb.q_heads || !pb.nq) refuse("q", "has no elements");
  if (!pb.kv_heads || !pb.nk) refuse("k", "has no elements");
  if (group < 1 || pb.q_heads % group || pb.q_heads / group % pb.kv_heads)
    refuse("k", "its number of heads must divide that of q");
  pb.group = group, pb.q_heads /= group, pb.nq *= group;
  pb.q = queries_of("q", q, pb, pb.d, false);
  pb.k = view_of("k", k, {outer, pb.kv_heads, tokens, pb.d}, false, scaled);
  pb.v = view_of(values, v, {outer, pb.kv_heads, tokens, pb.dv_dim}, false, scaled);
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
  View v = queries_of(name, a, pb, 0, written);
  if (v.dtype != F32) refuse(name, "wanted float32");
  return v;
}

// The rows of the plan, from which forward starts.
void rows_of_plan(Problem &pb, Arguments &given) {
  const int q_tile = given.get<int>("q_tile"), kv_tile = given.get<int>("kv_tile");
  if (q_tile < 1 || q_tile > kMostTile) refuse("q_tile", "wanted 1 to 256, got " + std::to_string(q_tile));
  if (kv_tile < 16 || kv_tile > kMostTile || kv_tile % 16)
    refuse("kv_tile", "wanted 16, 32, ... 256, got " + std::to_string(kv_tile));
  if (pb.group > 1 && q_tile != pb.group) refuse("group", "wanted the rows of a query tile, " + std::to_string(q_tile));
  Plan &p = pb.plan;
  p.q_tile = q_tile, p.kv_tile = kv_tile, p.words = (kv_tile + 31) / 32;
  p.q_tiles = (pb.nq + q_tile - 1) / q_tile, p.k_tiles = (pb.nk + kv_tile - 1) / kv_tile;
  const Array row_ptr = given.keep("row_ptr"), col = given.keep("col"), mask_words = given.keep("mask_words");
  p.row_ptr = ints("row_ptr", row_ptr, {-1, p.q_tiles + 1});
  p.row_sets = row_ptr.shape(0);
  p.col = ints("col", col, {-1});
  const int64_t nnz = col.shape(0);
  p.mask_id = ints("mask_id", given.keep("mask_id"), {nnz});
  p.mask_words = ints("mask_words", mask_words, {-1, p.q_tile, p.words});
  p.masks = mask_words.shape(0), p.entries = nnz;
  p.row_set = ints("row_set", given.keep("row_set"), {pb.batch, pb.q_heads});
  check_offsets("row_ptr", p.row_ptr, p.row_sets, p.q_tiles + 1, nnz);
  check_range("col", p.col, nnz, 0, p.k_tiles);
  check_range("mask_id", p.mask_id, nnz, -1, p.masks);
  check_range("row_set", p.row_set, pb.batch * pb.q_heads, 0, p.row_sets);
}

// The keys that the plan's key tiles list, where they are not all keys in order (see View::chosen).
void choose(Problem &pb, Arguments &given) {
  const Maybe chosen = given.maybe("chosen");
  if (!chosen) return;
  const int64_t keys = pb.tokens = pb.nk;
  pb.k.chosen = pb.v.chosen = ints("chosen", *chosen, {-1});
  pb.nk = (int64_t)chosen->shape(0);
  if (!pb.nk) refuse("chosen", "has no elements");
  check_range("chosen", pb.k.chosen, pb.nk, 0, keys);
}

// Checks that no batch element reads chosen keys past the end of its pages.
void check_chosen(const Problem &pb) {
  const Plan &p = pb.plan;
  std::vector<int32_t> most(p.row_sets, -1);
  for (int64_t g = 0; g < p.row_sets; ++g) {
    const int32_t *ends = p.row_ptr + g * (p.q_tiles + 1);
    for (int64_t e = ends[0]; e < ends[p.q_tiles]; ++e) {
      const int64_t first = (int64_t)p.col[e] * p.kv_tile, last = smaller(first + p.kv_tile, pb.nk);
      for (int64_t n = first; n < last; ++n) most[g] = most[g] > pb.k.chosen[n] ? most[g] : pb.k.chosen[n];
    }
  }
  for (int64_t i = 0; i < pb.batch * pb.q_heads; ++i)
    if (most[p.row_set[i]] >= pb.k.pages->lengths[i / pb.q_heads]) refuse("chosen", "a key is past the last page");
}

// Checks that the plan is one of lists that are packed: all heads of a group attend the keys of a query, which ascend, in
// tiles that follow one another, and only the last of them is partial.
void check_packed(const Problem &pb) {
  const Plan &p = pb.plan;
  if (p.q_tile != pb.group) refuse("group", "wanted the rows of a query tile, " + std::to_string(p.q_tile));
  bool fits = pb.nk % p.kv_tile == 0;
  for (int64_t e = 0; e < p.entries; ++e) fits &= p.col[e] == e;
  if (!fits) refuse("col", "wanted whole tiles of packed keys, in order");
  for (int64_t m = 0; m < p.masks; ++m) {
    const int32_t *mask = p.mask_words + m * p.q_tile * p.words;
    for (int w = 0; w < p.words; ++w) {
      const uint32_t bits = (uint32_t)mask[w], most = p.kv_tile - 32 * w < 32 ? (1u << p.kv_tile % 32) - 1 : ~0u;
      fits &= bits <= most && (bits & (bits + 1)) == 0 && (!w || !bits || mask[w - 1] == -1);
    }
    for (int r = 1; r < p.q_tile; ++r) fits &= !std::memcmp(mask, mask + r * p.words, 4 * (size_t)p.words);
  }
  for (int64_t g = 0; g < p.row_sets; ++g)
    for (int64_t tile = 0; tile < p.q_tiles; ++tile) {
      const int32_t *ends = p.row_ptr + g * (p.q_tiles + 1) + tile;
      for (int64_t e = ends[0]; e + 1 < ends[1]; ++e) fits &= p.mask_id[e] < 0;
    }
  if (!fits) refuse("mask_words", "wanted the first keys of the last tile of a query, for all heads");
  for (int64_t i = 0; i < pb.batch * pb.q_heads; ++i)
    for (int64_t tile = 0; tile < p.q_tiles; ++tile) {
      const Listed list = listed(pb, {(int32_t)(i / pb.q_heads), (int32_t)(i % pb.q_heads), 1, 0}, tile);
      fits &= ascends(pb.k.chosen + list.first, list.count);
    }
  if (!fits) refuse("chosen", "wanted the keys of each query in ascending order");
  if (pb.score_terms.drop) refuse("drop", "wanted none with chosen keys");
  for (int i = 0; i < pb.score_terms.count; ++i)
    if (pb.score_terms.terms[i].kind != Term::pointwise) refuse("terms", "wanted none with positions with chosen keys");
}

// The columns of the plan, over which backward runs.
void columns_of_plan(Problem &pb, Arguments &given) {
  Plan &p = pb.plan;
  p.col_ptr = ints("col_ptr", given.keep("col_ptr"), {p.row_sets, p.k_tiles + 1});
  const Array row = given.keep("row");
  p.row = ints("row", row, {-1});
  const int64_t nnz = row.shape(0);
  p.mask_id_t = ints("mask_id_t", given.keep("mask_id_t"), {nnz});
  check_offsets("col_ptr", p.col_ptr, p.row_sets, p.k_tiles + 1, nnz);
  check_range("row", p.row, nnz, 0, p.q_tiles);
  check_columns(p.row, p.col_ptr, p.row_sets, p.k_tiles + 1);
  check_range("mask_id_t", p.mask_id_t, nnz, -1, p.masks);
}

// (first, step, side) of a relation by residue; empty for other relations.
void space(Problem &pb, Arguments &given) {
  const auto spacing = given.get<std::vector<int64_t>>("spacing", {});
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
    const bool of_keys = a.ndim() == 2;
    if (of_keys)
      check_shape("alibi", a, {pb.q_heads, (int64_t)a.shape(1)});
    else
      check_shape("alibi", a, {pb.q_heads});
    t.table.head = stride(0), t.column = of_keys ? stride(1) : 0;
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
          ascends(pb.score_terms.rows, pb.nq) && ascends(pb.score_terms.columns, pb.nk);
}

// Checks that the distance of any two positions fits in 32 bits.
void check_positions(const char *name, const int32_t *x, int64_t n, const int32_t *offset, int64_t offsets) {
  constexpr int64_t most = 1 << 29;
  check_range(name, x, n, -most, most);
  if (offset) check_range((name[0] == 'r' ? "q_offset" : "k_offset"), offset, offsets, -most, most);
}

// Sets terms and dropout; `found` has to live as long as the problem.
void read_score_terms(Problem &pb, Arguments &given, std::vector<Term> &found) {
  ScoreTerms &s = pb.score_terms;
  const Terms terms = given.get<Terms>("terms", {});
  const auto table_grads = given.get<std::vector<Maybe>>("table_grads", {});
  const int64_t drop = given.get<int64_t>("drop", 0);
  if (drop < 0 || drop > 65535) refuse("drop", "wanted 0 to 65535, got " + std::to_string(drop));
  s.drop = (uint32_t)drop, s.seed = (uint64_t)given.get<int64_t>("seed", 0);
  bool placed = s.drop > 0;
  for (const auto &[kind, numbers, table] : terms) {
    found.push_back(term_of(pb, kind, numbers, table));
    if (table) given.kept.push_back(*table);
    placed |= found.back().kind != Term::pointwise;
  }
  s.terms = found.data(), s.count = (int)found.size();
  if (!table_grads.empty() && table_grads.size() != found.size())
    refuse("table_grads", "wanted one for each term, or none");
  const Maybe rows = given.maybe("rows"), columns = given.maybe("columns"), heads = given.maybe("heads");
  const Maybe q_offset = given.maybe("q_offset"), k_offset = given.maybe("k_offset");
  if (!placed) return;
  auto wanted = [&](const char *name, const Maybe &a, int64_t n) {
    if (!a) refuse(name, "wanted with alibi, distance, bias and dropout");
    return ints(name, given.kept.emplace_back(*a), {n});
  };
  auto offset = [&](const char *name, const Maybe &a, int64_t &step) -> const int32_t * {
    if (!a) return nullptr;
    step = a->ndim() == 1 && a->shape(0) == 1 ? 0 : 1;
    return ints(name, given.kept.emplace_back(*a), {step ? pb.batch : 1});
  };
  s.rows = wanted("rows", rows, pb.nq), s.columns = wanted("columns", columns, pb.nk);
  s.q_offset = offset("q_offset", q_offset, s.q_offset_step);
  s.k_offset = offset("k_offset", k_offset, s.k_offset_step);
  if (s.drop) s.heads = wanted("heads", heads, pb.q_heads);
  check_positions("rows", s.rows, pb.nq, s.q_offset, s.q_offset_step ? pb.batch : 1);
  check_positions("columns", s.columns, pb.nk, s.k_offset, s.k_offset_step ? pb.batch : 1);
  for (size_t i = 0; i < found.size(); ++i) {
    const Maybe &table = std::get<2>(terms[i]);
    if (found[i].kind == Term::bias) {
      check_range("rows", s.rows, pb.nq, 0, (int64_t)table->shape(2));
      check_range("columns", s.columns, pb.nk, 0, (int64_t)table->shape(3));
    } else if (found[i].kind == Term::alibi && table->ndim() == 2) {
      check_range("columns", s.columns, pb.nk, 0, (int64_t)table->shape(1));
    }
    if (table_grads.empty() || !table_grads[i]) continue;
    if (pb.group > 1) refuse("group", "wanted 1 with gradients of tables");
    if (found[i].kind == Term::pointwise || found[i].kind == Term::alibi)
      refuse("table_grads", "a term of kind \"" + std::get<0>(terms[i]) + "\" has none");
    gradient_of(found[i], pb, *table, *table_grads[i]);
  }
}

bool bind_forward(const nb::kwargs &named) {
  Arguments given(named);
  const Kernel &kernel = pick(given);
  const int threads = threads_of(given);
  const Maybe table = given.maybe("table"), lengths = given.maybe("lengths");
  const Maybe k_scale = given.maybe("k_scale"), v_scale = given.maybe("v_scale");
  const bool scaled = k_scale && v_scale;
  Problem pb = inputs(given, "v", scaled, given.get<int>("group", 1));
  pb.out = queries_of("out", given.array("out"), pb, pb.dv_dim, true);
  if (pb.out.dtype != pb.q.dtype && pb.out.dtype != F32) refuse("out", "wanted the dtype of q, or float32");
  pb.lse = floats("lse", given.array("lse"), pb, true);
  choose(pb, given);
  rows_of_plan(pb, given);
  space(pb, given);
  if (pb.k.chosen && pb.spacing.step) refuse("chosen", "wanted no relation by residue");
  Pages pages;
  if (table) {
    const Array k = given.array("k");
    if (!lengths) refuse("lengths", "wanted with a table");
    pages = pages_of(*table, *lengths, pb.batch, (int64_t)k.shape(2), (int64_t)k.shape(0));
    pb.k.pages = pb.v.pages = &pages;
    if (pb.k.chosen) check_chosen(pb);
  }
  View scales[2];
  if (scaled) {
    const Array k = given.array("k");
    auto scales_of = [&](const char *name, const Array &a, View &of, View &to) {
      to = view_of(name, a, {(int64_t)k.shape(0), pb.kv_heads, (int64_t)k.shape(2)}, false);
      if (to.dtype != F32) refuse(name, "wanted float32");
      to.pages = of.pages, to.chosen = of.chosen, of.scales = &to;
    };
    scales_of("k_scale", *k_scale, pb.k, scales[0]);
    scales_of("v_scale", *v_scale, pb.v, scales[1]);
  }
  std::vector<Term> found;
  read_score_terms(pb, given, found);
  const bool longest_first = given.get<bool>("longest_first", true);
  given.end();
  int32_t below = 0;
  pb.below = &below;
  nb::gil_scoped_release release;
  forward(pb, row_work(pb, longest_first), kernel, threads);
  return below != 0;
}

void bind_tile_mass(const nb::kwargs &named) {
  Arguments given(named);
  const Kernel &kernel = pick(given);
  const int threads = threads_of(given);
  Problem pb = inputs(given, "k");
  pb.dv_dim = 0;  // there are no values
  pb.lse = floats("lse", given.array("lse"), pb, false);
  rows_of_plan(pb, given);
  const Plan &plan = pb.plan;
  std::vector<int64_t> first;
  int64_t total = 0;
  for (int64_t i = 0; i < pb.batch * pb.q_heads; ++i) {
    const int32_t *ends = plan.row_ptr + plan.row_set[i] * (plan.q_tiles + 1);
    first.push_back(total);
    total += ends[plan.q_tiles] - ends[0];
  }
  const Array values = given.array("values");
  const int width = values.ndim() == 2 && values.shape(1) == 1 ? 1 : plan.q_tile;
  check_shape("values", values, {total, width});
  if (dtype_of("values", values) != F32) refuse("values", "wanted float32");
  check_compact("values", values);
  given.end();
  nb::gil_scoped_release release;
  tile_mass(pb, {(float *)values.data(), first.data(), width}, kernel, threads);
}

void bind_choose(const nb::kwargs &named) {
  Arguments given(named);
  const Kernel &kernel = pick(given);
  const int threads = threads_of(given);
  Problem pb = inputs(given, "k");
  pb.dv_dim = 0;  // there are no values
  if (pb.kv_heads != 1) refuse("k", "wanted one head, which all heads of q share");
  if (pb.scale != 1 && pb.scale != -1) refuse("scale", "wanted 1 or -1; its size is a factor of the weights");
  Choice choice;
  choice.weights = floats("weights", given.array("weights"), pb, false);
  rows_of_plan(pb, given);
  const Array index = given.array("index");
  choice.index = const_cast<int32_t *>(ints("index", index, {pb.batch, pb.nq, -1}));
  choice.top_k = index.shape(2);
  given.end();
  nb::gil_scoped_release release;
  choose(pb, choice, kernel, threads);
}

void check_gradient(const char *name, const View &v, const Problem &pb) {
  if (v.dtype != pb.q.dtype && v.dtype != F32) refuse(name, "wanted the dtype of q, or float32");
}

void bind_backward(const nb::kwargs &named) {
  Arguments given(named);
  const Kernel &kernel = pick(given);
  const int threads = threads_of(given);
  Problem pb = inputs(given, "v", false, given.get<int>("group", 1));
  pb.dout = queries_of("dout", given.array("dout"), pb, pb.dv_dim, false);
  same_dtype("dout", pb.dout.dtype, pb.q.dtype);
  pb.lse = floats("lse", given.array("lse"), pb, false);
  pb.delta = floats("delta", given.array("delta"), pb, false);
  pb.dq = queries_of("dq", given.array("dq"), pb, pb.d, true);
  pb.dk = view_of("dk", given.array("dk"), {pb.batch, pb.kv_heads, pb.nk, pb.d}, true);
  pb.dv = view_of("dv", given.array("dv"), {pb.batch, pb.kv_heads, pb.nk, pb.dv_dim}, true);
  check_gradient("dq", pb.dq, pb), check_gradient("dk", pb.dk, pb), check_gradient("dv", pb.dv, pb);
  choose(pb, given);
  rows_of_plan(pb, given);
  if (!pb.k.chosen) columns_of_plan(pb, given);
  std::vector<Term> found;
  read_score_terms(pb, given, found);
  given.end();
  if (pb.k.chosen) check_packed(pb);
  nb::gil_scoped_release release;
  if (pb.k.chosen)
    backward_lists(pb, kernel, threads);
  else
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

void compact(View &v, int64_t heads, int64_t tokens, int64_t width) {
  v.token = width * bytes_of(v.dtype), v.head = tokens * v.token, v.batch = heads * v.head;
}

// The types and the layouts of the results of a call that is made often.
void results_of(Problem &pb, Arguments &given) {
  pb.dout.dtype = pb.dq.dtype = pb.dk.dtype = pb.dv.dtype = pb.q.dtype;
  pb.out.dtype = given.get<bool>("wide", false) ? F32 : pb.q.dtype;
  pb.lse.dtype = pb.delta.dtype = F32;
  const int64_t heads = pb.q_heads * pb.group, queries = pb.nq / pb.group;
  compact(pb.out, heads, queries, pb.dv_dim), compact(pb.dq, heads, queries, pb.d);
  compact(pb.lse, heads, queries, 1), compact(pb.delta, heads, queries, 1);
  for (View *of_queries : {&pb.out, &pb.dq, &pb.lse, &pb.delta}) heads_as_rows(*of_queries, pb.group);
  compact(pb.dk, pb.kv_heads, pb.nk, pb.d), compact(pb.dv, pb.kv_heads, pb.nk, pb.dv_dim);
}

// Sets the address and the strides of a tensor.
void place(const char *name, View &v, uintptr_t data, const nb::tuple &strides) {
  if (!data || strides.size() != 4 || nb::cast<int64_t>(strides[3]) != 1)
    refuse(name, "wanted memory, and stride 1 in the last dimension");
  const int64_t size = bytes_of(v.dtype);
  v.data = (char *)data;
  v.batch = nb::cast<int64_t>(strides[0]) * size, v.head = nb::cast<int64_t>(strides[1]) * size;
  v.token = nb::cast<int64_t>(strides[2]) * size;
}

// The results of forward; lse is null if it is not requested. Returns whether a score may be out of range.
bool run_forward(Problem &call, const Work &work, const Kernel &kernel, uintptr_t out, uintptr_t lse, int threads) {
  std::vector<float> unasked(lse ? 0 : (size_t)(call.batch * call.q_heads * call.nq));
  call.out.data = (char *)out, call.lse.data = lse ? (char *)lse : (char *)unasked.data();
  int32_t below = 0;
  call.below = &below;
  ringweave::forward(call, work, kernel, threads);
  return below != 0;
}

// A call that is made often. The constructor checks its sizes, types, plan and terms, and divides it into work, which is
// that of backward if asked for. Later calls only pass addresses and strides; the caller guarantees that sizes and types
// are those of the constructor's tensors.
class Prepared {
 public:
  explicit Prepared(const nb::kwargs &named) : Prepared(Arguments(named)) {}
  bool forward(uintptr_t q, const nb::tuple &qs, uintptr_t k, const nb::tuple &ks, uintptr_t v, const nb::tuple &vs,
               uintptr_t out, uintptr_t lse, int threads) const {
    check_threads(threads);
    Problem call = pb;
    place("q", call.q, q, qs), place("k", call.k, k, ks), place("v", call.v, v, vs);
    nb::gil_scoped_release release;
    return run_forward(call, work, kernel, out, lse, threads);
  }
  // out and lse are the results of forward; dlse is contiguous or null.
  void backward(uintptr_t dout, const nb::tuple &douts, uintptr_t q, const nb::tuple &qs, uintptr_t k,
                const nb::tuple &ks, uintptr_t v, const nb::tuple &vs, uintptr_t out, uintptr_t lse, uintptr_t dlse,
                uintptr_t dq, uintptr_t dk, uintptr_t dv, int threads) const {
    check_threads(threads);
    if (!pb.plan.col_ptr) refuse("backward", "was not asked for");
    if (pb.score_terms.any()) refuse("terms", "wanted none in backward");
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
    for (int64_t i = 0; i < rows; ++i)
      if (lses[i] == -INFINITY) deltas[i] = 0;  // a row that attends nothing has zero gradients
    ringweave::backward(call, work, kernel, threads);
  }

 private:
  explicit Prepared(Arguments given) : kernel(pick(given)) {
    pb = inputs(given);
    rows_of_plan(pb, given);
    space(pb, given);
    read_score_terms(pb, given, found);
    results_of(pb, given);
    const bool learns = given.get<bool>("backward", false);
    if (learns) columns_of_plan(pb, given);
    work = learns ? column_work(pb) : row_work(pb);
    given.end();
    kept = std::move(given.kept);
  }
  const Kernel &kernel;
  Problem pb;
  std::vector<Array> kept;  // of the plan and the terms, which pb points into
  std::vector<Term> found;
  Work work;
};

// A decoding step, of one query at the last key of each batch element. The constructor checks types and sizes, of the
// keys only those of a head, and the trees of the heads' relations. Later calls have any number of keys, in tensors or
// in pages; the caller guarantees that types, batch elements and heads are those of the constructor's tensors. With lists
// of keys, one relation filters them, and the heads of a group, which share them, are rows.
class Step {
 public:
  explicit Step(const nb::kwargs &named) : Step(Arguments(named)) {}
  // With `side` > 0 the relation is one by residue, and its sums are cut at tiles of `side` tokens. With `rate` > 1 its
  // keys are those of a strided view. With pages, `table` and `lengths` are addresses, and no sequence has more than
  // `keys` tokens. Pages of 8 bits have contiguous scales. `lists` is the address of contiguous lists.
  bool forward(uintptr_t q, const nb::tuple &qs, uintptr_t k, const nb::tuple &ks, uintptr_t v, const nb::tuple &vs,
               uintptr_t out, uintptr_t lse, int64_t keys, int64_t first, int64_t rate, int64_t tile, int64_t side,
               int threads, uintptr_t table, uintptr_t lengths, uintptr_t k_scale, uintptr_t v_scale,
               uintptr_t lists) const {
    check_threads(threads);
    check_tile(tile);
    if (keys < 1 || keys > INT32_MAX) refuse("keys", "wanted 1 to 2147483647, got " + std::to_string(keys));
    if (rate < 1 || first < 0 || first >= rate || first >= keys) refuse("first, rate", "wanted 0 <= first < rate");
    Problem call = pb;
    if (side) check_tile(side), call.spacing = {first % side, rate, side};
    place("q", call.q, q, qs), place("k", call.k, k, ks), place("v", call.v, v, vs);
    if (chosen.most) return of_lists(call, (const int32_t *)lists, out, lse, keys, tile, threads);
    std::vector<int64_t> of_element(pb.batch, keys);
    Pages pages;
    if (stored) {
      pages.numbers = (const int32_t *)table, pages.lengths = (const int32_t *)lengths, pages.columns = columns_of_table;
      for (pages.shift = 0; 1 << pages.shift < size;) ++pages.shift;
      if (!table || !lengths || keys > pages.columns * size) refuse("table", "wanted with lengths that it has room for");
      check_range("lengths", pages.lengths, pb.batch, 0, keys + 1);
      for (int64_t b = 0; b < pb.batch; ++b) {
        of_element[b] = pages.lengths[b];
        check_range("table", pages.numbers + b * pages.columns, (of_element[b] + size - 1) / size, 0, stored);
      }
      if (rate > 1) refuse("rate", "wanted 1 with pages");
      call.k.pages = call.v.pages = &pages;
    }
    View scales[2];
    if (bytes_of(pb.k.dtype) == 1) {
      if (!k_scale || !v_scale) refuse("k_scale, v_scale", "wanted with 8 bits");
      for (View &of : scales) of.token = 4, of.head = size * 4, of.batch = pb.kv_heads * of.head, of.pages = &pages;
      scales[0].data = (char *)k_scale, call.k.scales = &scales[0];
      scales[1].data = (char *)v_scale, call.v.scales = &scales[1];
    }
    nb::gil_scoped_release release;
    const Strided view{first, rate};
    const StepPlan rows(trees, of_head, of_element, view, tile);
    call.plan = rows.plan(), call.nk = view.count(keys);
    for (View *of : {&call.k, &call.v})
      if (rate > 1) of->data += first * of->token, of->token *= rate;
    return run_forward(call, row_work(call), kernel, out, lse, threads);
  }

 private:
  bool of_lists(Problem &call, const int32_t *blocks, uintptr_t out, uintptr_t lse, int64_t keys, int64_t tile,
                int threads) const {
    Lists lists = chosen;
    lists.blocks = blocks;
    const int64_t count = lists.batch * lists.heads, number = (keys + lists.size - 1) / lists.size;
    if (!blocks || call.spacing.step) refuse("lists", "wanted memory, and no relation by residue");
    if (!lists.packs && lists.size % tile) refuse("tile", "wanted a divisor of the blocks");
    if (count * (keys + tile) > INT32_MAX) refuse("lists", "they are for too many keys");
    check_range("lists", blocks, count * lists.most, -1, number);
    heads_as_rows(call.q, call.group);
    nb::gil_scoped_release release;
    const StepPlan rows(trees[0], lists, call, keys, tile);
    call.plan = rows.plan(), call.nk = lists.packs ? (int64_t)rows.chosen.size() : keys;
    if (lists.packs) call.k.chosen = call.v.chosen = rows.chosen.data();
    return run_forward(call, row_work(call), kernel, out, lse, threads);
  }
  static void check_tile(int64_t tile) {
    if (tile < 16 || tile > kMostTile || tile % 16) refuse("tile", "wanted 16, 32, ... 256, got " + std::to_string(tile));
  }
  explicit Step(Arguments given) : kernel(pick(given)) {
    const bool scaled = given.get<bool>("scaled", false);
    const Maybe table = given.maybe("table");
    pb = inputs(given, "v", scaled, given.get<int>("group", 1));
    if (pb.nq != pb.group) refuse("q", "wanted one query");
    if (scaled && !table) refuse("scaled", "wanted with a table");
    if (table) {
      const Array k = given.array("k");
      ints("table", *table, {pb.batch, -1});
      stored = (int64_t)k.shape(0), size = (int64_t)k.shape(2), columns_of_table = (int64_t)table->shape(1);
      if (size < kLeastPage || size > kMostTile || size & (size - 1))
        refuse("k", "wanted pages of 16, 32, ... 256 tokens, got " + std::to_string(size));
    }
    // zones are read in each call, so they are kept
    held = given.get<std::vector<std::tuple<std::vector<nb::object>, std::string>>>("trees");
    for (const auto &[leaves, text] : held) {
      Tree tree;
      tree.text = text;
      for (const nb::object &leaf : leaves) {
        const Zones *zones = nullptr;
        if (!nb::try_cast(leaf, zones) || !zones) refuse("trees", "a leaf is no Zones");
        tree.leaves.push_back({zones, 0, 0});
      }
      if (!depth_of(text, leaves.size())) refuse("trees", "wanted a tree of its leaves, got \"" + text + "\"");
      trees.push_back(std::move(tree));
    }
    of_head = given.get<std::vector<int32_t>>("of_head");
    if ((int64_t)of_head.size() != pb.q_heads) refuse("of_head", "wanted a tree for each head");
    check_range("of_head", of_head.data(), pb.q_heads, 0, (int64_t)trees.size());
    if (const Maybe lists = given.maybe("lists")) {
      ints("lists", *lists, {-1, -1, -1});
      chosen.batch = lists->shape(0), chosen.heads = lists->shape(1), chosen.most = lists->shape(2);
      chosen.size = given.get<int64_t>("block_size"), chosen.packs = given.get<bool>("packs");
      const bool fits = (chosen.batch == 1 || chosen.batch == pb.batch) && chosen.heads && pb.q_heads % chosen.heads == 0;
      if (!fits || !chosen.most) refuse("lists", "wanted keys for every batch element and group of heads");
      if (chosen.size < 1 || chosen.size > INT32_MAX) refuse("block_size", "wanted 1 to 2147483647");
      if (table || trees.size() > 1) refuse("lists", "wanted without pages, and with one relation of all heads");
    } else if (pb.group > 1) {
      refuse("group", "wanted with lists");
    }
    results_of(pb, given);
    given.end();
  }
  const Kernel &kernel;
  Problem pb;
  std::vector<std::tuple<std::vector<nb::object>, std::string>> held;
  std::vector<Tree> trees;
  std::vector<int32_t> of_head;
  Lists chosen;
  int64_t stored = 0, size = 0, columns_of_table = 0;  // number of pages, tokens per page, and columns of the table
};

// Checks that half-open ranges ascend and share nothing.
void check_disjoint(const char *name, const int64_t *start, const int64_t *stop, int64_t n) {
  bool wrong = false;
  for (int64_t i = 0; i < n; ++i) wrong |= stop[i] < start[i] || (i && start[i] < stop[i - 1]);
  if (wrong) refuse(name, "wanted ranges that ascend and do not overlap");
}

// Zones copy the arrays. A later write to an array does not reach zones that were checked.
Zones zones_of(Arguments &given) {
  Zones z;
  const auto numbers = [&](const char *name, int64_t wanted) {
    const ReadArray a = given.get<ReadArray>(name);
    const int64_t *x = ints<int64_t>(name, a, {wanted}), n = (int64_t)a.shape(0);
    check_range(name, x, n, -kFarthest, kFarthest + 1);
    return std::vector<int64_t>(x, x + n);
  };
  z.q0 = numbers("q0", -1);
  const int64_t groups = (int64_t)z.q0.size();
  z.q1 = numbers("q1", groups), z.d0 = numbers("d0", groups), z.d1 = numbers("d1", groups);
  z.phase = numbers("phase", groups);
  const auto ptr = given.get<std::optional<ReadArray>>("ptr", {});
  z.k0 = numbers("k0", ptr ? -1 : groups);
  const int64_t runs = (int64_t)z.k0.size();
  z.k1 = numbers("k1", runs);
  check_disjoint("q0, q1", z.q0.data(), z.q1.data(), groups);
  if (ptr) {
    const int64_t *x = ints<int64_t>("ptr", *ptr, {groups + 1});
    z.ptr.assign(x, x + groups + 1);
    check_range("ptr", z.ptr.data(), groups + 1, 0, runs + 1);
    if (z.ptr[0] != 0 || z.ptr[groups] != runs || !std::is_sorted(z.ptr.begin(), z.ptr.end()))
      refuse("ptr", "wanted numbers that ascend from 0 to the number of runs, " + std::to_string(runs));
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = ptr ? z.ptr[g] : g, stop = ptr ? z.ptr[g + 1] : g + 1;
    check_disjoint("k0, k1", z.k0.data() + first, z.k1.data() + first, stop - first);
  }
  const auto residue = given.get<std::optional<std::tuple<int64_t, int64_t, int64_t>>>("residue", {});
  given.end();
  if (!residue) return z;
  const auto [axis, m, width] = *residue;
  if (axis < 0 || axis > 2 || m < 1 || m > kFarthest || width < 0 || width > m)
    refuse("residue", "wanted (axis of 0 to 2, m >= 1, width of 0 to m)");
  z.axis = (Zones::Axis)axis, z.m = m, z.width = width;
  for (int64_t i = 0; i < 64 && m <= kMostRepeated; ++i) z.repeated |= (uint64_t)(i % m < width) << i;
  return z;
}

void bind_paint(const Zones &zones, const ReadArray &q_lo, const ReadArray &q_hi, const ReadArray &k_lo,
                const ReadArray &k_hi, const Array &out, int threads) {
  check_threads(threads);
  uint32_t *to = const_cast<uint32_t *>(ints<uint32_t>("out", out, {-1, -1, -1}));
  Tiles tiles = {};
  tiles.count = (int64_t)out.shape(0), tiles.rows = (int64_t)out.shape(1), tiles.words = (int64_t)out.shape(2);
  const auto sides = [&](const char *name, const ReadArray &a) {
    const int64_t *x = ints<int64_t>(name, a, {tiles.count});
    check_range(name, x, tiles.count, -kFarthest, kFarthest + 1);
    return x;
  };
  tiles.q_lo = sides("q_lo", q_lo), tiles.q_hi = sides("q_hi", q_hi);
  tiles.k_lo = sides("k_lo", k_lo), tiles.k_hi = sides("k_hi", k_hi);
  const auto check_sizes = [&](const char *name, const int64_t *lo, const int64_t *hi, int64_t most) {
    bool wrong = false;
    for (int64_t i = 0; i < tiles.count; ++i) wrong |= hi[i] < lo[i] || hi[i] - lo[i] > most;
    if (wrong) refuse(name, "wanted tiles of 0 to " + std::to_string(most) + ", which \"out\" has room for");
  };
  check_sizes("q_lo, q_hi", tiles.q_lo, tiles.q_hi, tiles.rows);
  check_sizes("k_lo, k_hi", tiles.k_lo, tiles.k_hi, 32 * tiles.words);
  nb::gil_scoped_release release;
  paint(zones, tiles, to, threads);
}

void bind_rows(const std::vector<const Zones *> &leaves, const std::string &tree, const ReadArray &q, const ReadArray &k,
               int64_t keys, int64_t tile, const Array &rows, const Array &states) {
  const auto n = (int64_t)leaves.size();
  const int64_t *of_q = ints<int64_t>("q", q, {-1, n}), strips = (int64_t)q.shape(0);
  const int64_t *of_k = ints<int64_t>("k", k, {strips, n});
  if (!depth_of(tree, leaves.size()))
    refuse("tree", "wanted a tree of " + std::to_string(n) + " leaves, got \"" + tree + "\"");
  check_range("q", of_q, strips * n, -kFarthest, kFarthest + 1);
  check_range("k", of_k, strips * n, -kFarthest, kFarthest + 1);
  if (keys < 0 || keys > INT32_MAX) refuse("keys", "wanted 0 to 2147483647, got " + std::to_string(keys));
  if (tile < 1) refuse("tile", "wanted at least 1, got " + std::to_string(tile));
  const int64_t words = (keys + 31) / 32, width = (keys + tile - 1) / tile;
  uint32_t *bits = const_cast<uint32_t *>(ints<uint32_t>("rows", rows, {strips, -1, words}));
  uint8_t *to = const_cast<uint8_t *>(ints<uint8_t>("states", states, {strips, width}));
  std::vector<Leaf> placed(leaves.size());
  for (const Zones *zones : leaves)
    if (!zones) refuse("leaves", "has None");
  const auto queries = (int64_t)rows.shape(1);
  nb::gil_scoped_release release;
  for (int64_t s = 0; s < strips; ++s, bits += queries * words, to += width) {
    for (size_t i = 0; i < leaves.size(); ++i) placed[i] = {leaves[i], *of_q++, *of_k++};
    paint_rows(placed, tree, queries, keys, bits);
    states_of(bits, queries, keys, tile, to);
  }
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
  m.attr("version") = kVersion;
  m.attr("sources") = kSources;
  m.def("variants", &variants, "Instruction-set builds that this machine can run, the best first.");
  m.def("term_kinds", &term_kinds, "The kinds of score terms that the kernels compute, by name.");
  m.def("forward", &bind_forward, "Whether an allowed score is -inf: a sum that overflowed, or an infinite input.");
  m.def("tile_mass", &bind_tile_mass,
        "Sums of weights by tile, in the order of batch, head and list; in one column, or a column for each query.");
  m.def("choose", &bind_choose, "The keys with the best scores of each query, by the lightning indexer.");
  m.def("backward", &bind_backward, "Gradients of q, k, v and of the tables of terms.");
  m.def("delta", &bind_delta, "dout"_a, "out"_a, "dlse"_a.none(), "delta"_a, "threads"_a, "variant"_a = "",
        "Compute delta = rowsum(dout * out) - dlse, an argument of backward; dlse may be None.");
  m.def("merge", &bind_merge, "out"_a, "lse"_a, "part"_a, "part_lse"_a, "threads"_a, "variant"_a = "",
        "Merge a partial result into (out, lse) in place. A row's bits depend on nothing else.");
  nb::class_<Prepared>(m, "Prepared", "A checked call. Its methods take addresses and strides of tensors, unchecked.")
      .def(nb::init<const nb::kwargs &>())
      .def("forward", &Prepared::forward, "q"_a, "q_strides"_a, "k"_a, "k_strides"_a, "v"_a, "v_strides"_a, "out"_a,
           "lse"_a, "threads"_a)
      .def("backward", &Prepared::backward, "dout"_a, "dout_strides"_a, "q"_a, "q_strides"_a, "k"_a, "k_strides"_a,
           "v"_a, "v_strides"_a, "out"_a, "lse"_a, "dlse"_a, "dq"_a, "dk"_a, "dv"_a, "threads"_a);
  nb::class_<Step>(m, "Step", "A checked decoding step. Its method takes addresses and strides of tensors, unchecked.")
      .def(nb::init<const nb::kwargs &>())
      .def("forward", &Step::forward, "q"_a, "q_strides"_a, "k"_a, "k_strides"_a, "v"_a, "v_strides"_a, "out"_a, "lse"_a,
           "keys"_a, "first"_a, "rate"_a, "tile"_a, "side"_a, "threads"_a, "table"_a = 0, "lengths"_a = 0,
           "k_scale"_a = 0, "v_scale"_a = 0, "lists"_a = 0);
  nb::class_<Zones>(m, "Zones", "Zones of a pattern, checked and copied (see csrc/paint.h).")
      .def("__init__",
           [](Zones *zones, const nb::kwargs &named) {
             Arguments given(named);
             new (zones) Zones(zones_of(given));
           })
      .def("paint", &bind_paint, "q_lo"_a, "q_hi"_a, "k_lo"_a, "k_hi"_a, "out"_a, "threads"_a,
           "Write the words of tiles: out (tiles, rows, words) is overwritten, and bits outside of a tile are 0.")
      .def_static("rows", &bind_rows, "leaves"_a, "tree"_a, "q"_a, "k"_a, "keys"_a, "tile"_a, "rows"_a, "states"_a,
                  "Write the keys that the consecutive queries of some strips attend as bits (strips, queries, words), and "
                  "the states of their tiles: 0 empty, 1 full, 2 partial.");
}
