// The extension module ringweave._cpu.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
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
  refuse("variant", "this machine cannot run \"" + variant + "\"");
}

void check_threads(int threads) {
  if (threads < 1 || threads > 4096) refuse("threads", "wanted 1 to 4096, got " + std::to_string(threads));
}

int head_dim(const char *name, const Array &a) {
  if (a.ndim() != 4) refuse(name, "wanted 4 dimensions (batch, head, token, channel), got " + std::to_string(a.ndim()));
  const int64_t d = (int64_t)a.shape(3);
  if (d < 8 || d > 256 || d % 8) refuse(name, "wanted a head dimension of 8, 16, ... 256, got " + std::to_string(d));
  return (int)d;
}

// q, k, v, scale and sizes.
Problem inputs(const Array &q, const Array &k, const Array &v, float scale) {
  Problem pb;
  pb.d = head_dim("q", q);
  head_dim("k", k);
  pb.dv_dim = head_dim("v", v);
  pb.batch = q.shape(0), pb.q_heads = q.shape(1), pb.nq = q.shape(2);
  pb.kv_heads = k.shape(1), pb.nk = k.shape(2);
  if (!pb.batch || !pb.q_heads || !pb.nq) refuse("q", "has no elements");
  if (!pb.kv_heads || !pb.nk) refuse("k", "has no elements");
  if (pb.q_heads % pb.kv_heads) refuse("k", "its number of heads must divide that of q");
  pb.q = view_of("q", q, {pb.batch, pb.q_heads, pb.nq, pb.d}, false);
  pb.k = view_of("k", k, {pb.batch, pb.kv_heads, pb.nk, pb.d}, false);
  pb.v = view_of("v", v, {pb.batch, pb.kv_heads, pb.nk, pb.dv_dim}, false);
  same_dtype("k", pb.k.dtype, pb.q.dtype);
  same_dtype("v", pb.v.dtype, pb.q.dtype);
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
  if (q_tile < 16 || q_tile > 256 || q_tile % 16)
    refuse("q_tile", "wanted 16, 32, ... 256, got " + std::to_string(q_tile));
  if (kv_tile < 16 || kv_tile > 256 || kv_tile % 16)
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

bool bind_forward(const Array &q, const Array &k, const Array &v, const Array &out, const Array &lse,
                  const Array &row_ptr, const Array &col, const Array &bits, const Array &masks, const Array &group,
                  int q_tile, int kv_tile, float scale, int threads, const std::string &variant) {
  const Kernel &kernel = pick(variant);
  check_threads(threads);
  Problem pb = inputs(q, k, v, scale);
  pb.out = view_of("out", out, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, true);
  if (pb.out.dtype != pb.q.dtype && pb.out.dtype != F32) refuse("out", "wanted the dtype of q, or float32");
  pb.lse = floats("lse", lse, pb, true);
  tiles(pb, q_tile, kv_tile);
  rows_of_plan(pb, row_ptr, col, bits, masks, group);
  int32_t below = 0;
  pb.below = &below;
  nb::gil_scoped_release release;
  forward(pb, kernel, threads);
  return below != 0;
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
                   const std::string &variant) {
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
  nb::gil_scoped_release release;
  backward(pb, kernel, threads);
}

void bind_delta(const Array &dout, const Array &out, const std::optional<Array> &dlse, const Array &delta_, int threads,
                const std::string &variant) {
  const Kernel &kernel = pick(variant);
  check_threads(threads);
  Problem pb;
  pb.dv_dim = head_dim("dout", dout);
  pb.batch = dout.shape(0), pb.q_heads = dout.shape(1), pb.nq = dout.shape(2);
  pb.dout = view_of("dout", dout, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, false);
  pb.out = view_of("out", out, {pb.batch, pb.q_heads, pb.nq, pb.dv_dim}, false);
  if (dlse) pb.dlse = floats("dlse", *dlse, pb, false);
  pb.delta = floats("delta", delta_, pb, true);
  nb::gil_scoped_release release;
  delta(pb, kernel, threads);
}

double bind_fma_peak(const std::string &dtype, int threads, double seconds, const std::string &variant) {
  if (dtype != "float32" && dtype != "bfloat16")
    refuse("dtype", "wanted \"float32\" or \"bfloat16\", got \"" + dtype + "\"");
  if (!(seconds > 0 && seconds <= 60)) refuse("seconds", "wanted more than 0, at most 60");
  check_threads(threads);
  const Kernel &kernel = pick(variant);
  nb::gil_scoped_release release;
  return fma_peak(kernel, dtype == "bfloat16" ? BF16 : F32, threads, seconds);
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
  m.def("variants", &variants, "Instruction-set builds that this machine can run, best first.");
  m.def("forward", &bind_forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "row_ptr"_a, "col"_a, "bits"_a, "masks"_a,
        "group"_a, "q_tile"_a, "kv_tile"_a, "scale"_a, "threads"_a, "variant"_a = "",
        "Whether an allowed score is -inf: a sum that overflowed, or an infinite input.");
  m.def("backward", &bind_backward, "dout"_a, "q"_a, "k"_a, "v"_a, "lse"_a, "delta"_a, "dq"_a, "dk"_a, "dv"_a,
        "row_ptr"_a, "col"_a, "bits"_a, "col_ptr"_a, "row"_a, "bits_t"_a, "masks"_a, "group"_a, "q_tile"_a, "kv_tile"_a,
        "scale"_a, "threads"_a, "variant"_a = "");
  m.def("delta", &bind_delta, "dout"_a, "out"_a, "dlse"_a.none(), "delta"_a, "threads"_a, "variant"_a = "",
        "delta = rowsum(dout * out) - dlse, what backward wants; dlse may be None.");
  m.def("fma_peak", &bind_fma_peak, "dtype"_a, "threads"_a, "seconds"_a, "variant"_a = "",
        "FLOP/s of a loop of multiply-adds: what the machine gives at best.");
}
