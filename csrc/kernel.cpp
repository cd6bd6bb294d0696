// One instruction-set build of the kernels. This file is compiled several times; RINGWEAVE_VARIANT names the build.
#include "backward_lists.h"
#include "mass.h"
#include "decode.h"
#include "indexer.h"

#define RW_TEXT_(x) #x
#define RW_TEXT(x) RW_TEXT_(x)
#define RW_JOIN_(a, b) a##b
#define RW_JOIN(a, b) RW_JOIN_(a, b)

namespace ringweave {
// bfloat16 is multiplied in pairs if the instruction set supports it; all other types are widened to float32. A build
// with pairs only has the loops for bfloat16, and calls the build that it extends for other types. It also calls that
// build for large scales (see is_large in overflow.py): a processor takes a product of pairs below 1.2e-38 as 0.
#if defined(RW_PAIRS)
#if defined(RINGWEAVE_NEON)
#define RW_ADDS_TO kernel_neon
#else
#define RW_ADDS_TO kernel_avx512
#endif
extern const Kernel RW_ADDS_TO;
#define RW_OTHERS(others, call) if (others) return RW_ADDS_TO.call
static bool widens(const Problem &pb, const View &x) { return x.dtype != BF16 || fabsf(pb.scale) > 1024; }
#else
#define RW_OTHERS(others, call)
#endif

namespace {

#if defined(RW_PAIRS)
using Own = Pair;
#else
using Own = Single;
#endif
// Calls the instance of f with terms and dropout, or the one without.
#define RW_CALL(f, ...) (pb.score_terms.any() ? f<Own, true>(__VA_ARGS__) : f<Own, false>(__VA_ARGS__))

size_t forward_bytes(const Problem &pb, int lanes) { return ForwardMemory(pb, lanes, nullptr).bytes; }
void run_forward(const Problem &pb, const Unit &u, const Piece &p, const Next &next, char *m, float *partials,
                 size_t stride) {
  RW_OTHERS(widens(pb, pb.k), forward(pb, u, p, next, m, partials, stride));
  RW_CALL(forward_piece, pb, u, p, next, m, Partials{partials, stride});
}

size_t mass_bytes(const Problem &pb, int lanes) { return MassMemory(pb, lanes, nullptr).bytes; }
size_t backward_bytes(const Problem &pb, int lanes) { return BackwardMemory(pb, lanes, nullptr).bytes; }
void run_mass(const Problem &pb, const Unit &u, const Piece &p, const Mass &mass, char *m) {
  RW_OTHERS(widens(pb, pb.q), mass(pb, u, p, mass, m));
  mass_piece<Own>(pb, u, p, mass, m);
}
void run_backward(const Problem &pb, const Unit &u, const Piece &p, const Turns &turns, char *m, float *partial) {
  RW_OTHERS(widens(pb, pb.q), backward(pb, u, p, turns, m, partial));
  RW_CALL(backward_piece, pb, u, p, turns, m, partial);
}

size_t kept_query_bytes(const Problem &pb, int most) { return KeptQuery::bytes(pb, most); }
size_t query_bytes(const Problem &pb) { return ListMemory(pb, nullptr).bytes; }
void run_query(const Problem &pb, const Unit &u, int64_t tile, const ListSums &sums, char *m, char *kept) {
  RW_OTHERS(widens(pb, pb.q), backward_query(pb, u, tile, sums, m, kept));
  RW_CALL(backward_query, pb, u, tile, sums, m, kept);
}
void run_range(const Problem &pb, const Unit &u, const ListSums &sums, int64_t first, int64_t last, char *kept,
               size_t stride, int64_t from, int64_t to) {
  RW_OTHERS(widens(pb, pb.q), backward_range(pb, u, sums, first, last, kept, stride, from, to));
  backward_range<Own>(pb, u, sums, first, last, kept, stride, from, to);
}

// all types are widened, so that 16-bit inputs have the scores of equal float32 inputs
void run_index(const Problem &pb, int64_t b, int64_t tile, const Choice &choice, char *m) {
  RW_OTHERS(true, index(pb, b, tile, choice, m));
  index_tile(pb, b, tile, choice, m);
}

// delta = rowsum(dout * out) - dlse
void run_delta(const Problem &pb, int64_t b, int64_t h, int64_t first, int64_t last) {
  float x[kMostChannels + W] = {}, y[kMostChannels + W] = {};
  for (int64_t n = first; n < last; ++n) {
    widen(x, row_at(pb.dout, b, h, n), pb.dout.dtype, pb.dv_dim);
    widen(y, row_at(pb.out, b, h, n), pb.out.dtype, pb.dv_dim);
    V sums = V{};
    for (int c = 0; c < pb.dv_dim; c += W) sums = fused(load(x + c), load(y + c), sums);
    float sum = 0;
    for (int i = 0; i < W; ++i) sum += sums[i];
    if (pb.dlse.data) sum -= load1(row_at(pb.dlse, b, h, n));
    memcpy(row_at(pb.delta, b, h, n), &sum, 4);
  }
}

// As merge_into of merge.py. A part without keys changes no bit, and a merge into an empty row copies the part.
void run_merge(const Problem &pb, int64_t b, int64_t h, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; ++n) {
    float *out = (float *)row_at(pb.out, b, h, n), *lse = (float *)row_at(pb.lse, b, h, n);
    const float *part = (const float *)row_at(pb.v, b, h, n);
    const float other = load1(row_at(pb.delta, b, h, n));
    if (other == -kInf) continue;
    if (*lse == -kInf) {
      memcpy(out, part, 4 * (size_t)pb.dv_dim), *lse = other;
      continue;
    }
    const float most = *lse > other ? *lse : other, top = isinf(most) ? 0 : most;
    const float old = expf(*lse - top), fresh = expf(other - top), total = old + fresh;
    const V a = splat(old / total), c = splat(fresh / total);
    int ch = 0;
    for (; ch + W <= pb.dv_dim; ch += W)
      store(out + ch, load(out + ch) * a + load(part + ch) * c);
    for (; ch < pb.dv_dim; ++ch) out[ch] = (splat(out[ch]) * a + splat(part[ch]) * c)[0];
    *lse = top + logf(total);
  }
}

// The largest squared length of the finite rows.
double longest(const View &t, int width, int64_t b, int64_t h, int64_t first, int64_t last) {
  float x[kMostChannels];
  double most = 0;
  for (int64_t n = first; n < last; ++n) {
    widen(x, row_at(t, b, h, n), t.dtype, width);
    double sum = 0;
    for (int c = 0; c < width; ++c) sum += (double)x[c] * x[c];
    if (sum > most && sum < (double)kInf) most = sum;
  }
  return most;
}

#if defined(RW_SQUARES)
constexpr bool (*agrees)() = squares_agree;
#else
constexpr bool (*agrees)() = nullptr;
#endif

}  // namespace

extern const Kernel RW_JOIN(kernel_, RINGWEAVE_VARIANT);
const Kernel RW_JOIN(kernel_, RINGWEAVE_VARIANT) = {RW_TEXT(RINGWEAVE_VARIANT),
                                                    forward_bytes,
                                                    run_forward,
                                                    forward_join,
                                                    mass_bytes,
                                                    run_mass,
                                                    backward_bytes,
                                                    run_backward,
                                                    backward_join,
                                                    kept_query_bytes,
                                                    query_bytes,
                                                    run_query,
                                                    run_range,
                                                    begin_sums,
                                                    end_sums,
                                                    run_delta,
                                                    run_merge,
                                                    longest,
                                                    index_bytes,
                                                    run_index,
                                                    kTermKinds,
                                                    agrees};

}  // namespace ringweave
