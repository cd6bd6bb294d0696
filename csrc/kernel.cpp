// One instruction-set build of the kernels. Compiled several times; RINGWEAVE_VARIANT names the build.
#include "backward.h"
#include "decode.h"

#define RW_TEXT_(x) #x
#define RW_TEXT(x) RW_TEXT_(x)
#define RW_JOIN_(a, b) a##b
#define RW_JOIN(a, b) RW_JOIN_(a, b)

namespace ringweave {
namespace {

// Pairs of bfloat16 where the machine multiplies them; else everything is widened to float32.
#if defined(__AVX512BF16__)
#define RW_CALL_(f, scored, ...) (pb.q.dtype == BF16 ? f<Pair, scored>(__VA_ARGS__) : f<Single, scored>(__VA_ARGS__))
#else
#define RW_CALL_(f, scored, ...) f<Single, scored>(__VA_ARGS__)
#endif
// With terms or dropout, or as if there were no such thing.
#define RW_CALL(f, ...) (pb.scoring.any() ? RW_CALL_(f, true, __VA_ARGS__) : RW_CALL_(f, false, __VA_ARGS__))

size_t forward_bytes(const Problem &pb, int lanes) { return ForwardMemory(pb, lanes, nullptr).bytes; }
size_t backward_bytes(const Problem &pb, int lanes) { return BackwardMemory(pb, lanes, nullptr).bytes; }

void run_forward(const Problem &pb, const Unit &u, const Piece &p, char *m, float *partials, size_t stride) {
  RW_CALL(forward_piece, pb, u, p, m, Partials{partials, stride});
}
void run_backward(const Problem &pb, const Unit &u, const Piece &p, const Turns &turns, char *m, float *partial) {
  RW_CALL(backward_piece, pb, u, p, turns, m, partial);
}

// delta = rowsum(dout * out) - dlse
void run_delta(const Problem &pb, int64_t b, int64_t h, int64_t first, int64_t last) {
  float x[kMostChannels + W] = {}, y[kMostChannels + W] = {};
  for (int64_t n = first; n < last; ++n) {
    widen(x, row_at(pb.dout, b, h, n), pb.dout.dtype, pb.dv_dim);
    widen(y, row_at(pb.out, b, h, n), pb.out.dtype, pb.dv_dim);
    V sums = V{};
    for (int c = 0; c < pb.dv_dim; c += W) sums += load(x + c) * load(y + c);
    float sum = 0;
    for (int i = 0; i < W; ++i) sum += sums[i];
    if (pb.dlse.data) sum -= load1(row_at(pb.dlse, b, h, n));
    memcpy(row_at(pb.delta, b, h, n), &sum, 4);
  }
}

// The largest squared length of a row, of those that are finite.
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

template <class Op>
int64_t fma_rounds(int64_t rounds) {
  constexpr int chains = W == 16 ? 24 : 12;
  volatile float half = 0.5f;  // unknown to the compiler, so that the loop is multiplied out
  V acc[chains], a = splat(half), b = splat(half);
#pragma GCC unroll 24
  for (int i = 0; i < chains; ++i) acc[i] = splat(half);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < chains; ++i) acc[i] = Op::madd(a, b, acc[i]);
  }
  V sum = V{};
#pragma GCC unroll 24
  for (int i = 0; i < chains; ++i) sum += acc[i];
  volatile float keep = sum[0];
  (void)keep;
  return rounds * chains * W * 2 * Op::depth;
}

int64_t fma_loop(Dtype dtype, int64_t rounds) {
#if defined(__AVX512BF16__)
  if (dtype == BF16) return fma_rounds<Pair>(rounds);
#endif
  (void)dtype;
  return fma_rounds<Single>(rounds);
}

}  // namespace

extern const Kernel RW_JOIN(kernel_, RINGWEAVE_VARIANT);
const Kernel RW_JOIN(kernel_, RINGWEAVE_VARIANT) = {RW_TEXT(RINGWEAVE_VARIANT),
                                                    forward_bytes,
                                                    run_forward,
                                                    forward_join,
                                                    backward_bytes,
                                                    run_backward,
                                                    backward_join,
                                                    run_delta,
                                                    longest,
                                                    fma_loop};

}  // namespace ringweave
