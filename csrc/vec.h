// Vectors of float32 lanes for each instruction set. Arithmetic uses GCC/Clang vector types; intrinsics are used only
// where these have no operation (max, round, scale, narrow).
// Everything is in an unnamed namespace, so that the linker never shares inline code between builds.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(RINGWEAVE_NEON)
#include <arm_neon.h>
#endif

// Whether the instruction set multiplies pairs of bfloat16.
#if defined(__AVX512BF16__) || (defined(RINGWEAVE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define RW_PAIRS
#endif

#define RW_INLINE inline __attribute__((always_inline))

namespace ringweave {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

// Number of vector registers.
#if defined(__AVX512F__) || defined(RINGWEAVE_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint64_t L __attribute__((vector_size(4 * W)));
typedef float VU __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint16_t H8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t I4U __attribute__((vector_size(16), aligned(1), may_alias));

constexpr float kInf = __builtin_inff(), kNan = __builtin_nanf(""), kMostFloat = __FLT_MAX__;
constexpr float kLog2e = 1.44269504088896340736f;

RW_INLINE V load(const void *p) { return *(const VU *)p; }
RW_INLINE void store(void *p, V v) { *(VU *)p = v; }
RW_INLINE float load1(const void *p) {
  float x;
  memcpy(&x, p, 4);
  return x;
}

RW_INLINE V splat(float x) {
#if defined(__AVX512F__)
  return (V)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (V)_mm256_set1_ps(x);
#else
  return V{x, x, x, x};
#endif
}

// Broadcasts a 4-byte element (a float, or a pair of bfloat16) to every lane.
RW_INLINE V splat_at(const char *p) { return splat(load1(p)); }

// The larger; b where either is NaN.
RW_INLINE V max(V a, V b) {
#if defined(__AVX512F__)
  return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// The smaller; b where either is NaN.
RW_INLINE V min(V a, V b) {
#if defined(__AVX512F__)
  return (V)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (V)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// The floats at p + index[lane].
RW_INLINE V gather(const float *p, const int32_t *index) {
#if defined(__AVX512F__)
  return (V)_mm512_i32gather_ps(_mm512_loadu_si512(index), p, 4);
#elif defined(__AVX2__)
  return (V)_mm256_i32gather_ps(p, _mm256_loadu_si256((const __m256i *)index), 4);
#else
  V x;
  for (int i = 0; i < W; ++i) x[i] = p[index[i]];
  return x;
#endif
}

// The product of the lower halves of 64-bit lanes.
RW_INLINE L low_product(L a, L b) {
#if defined(__AVX512F__)
  return (L)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (L)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(RINGWEAVE_NEON)
  return (L)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// One bit per lane: whether x >= y.
RW_INLINE uint32_t at_least(U x, uint32_t y) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask((__m512i)x, _mm512_set1_epi32((int32_t)y));
#else
  const I same = (I)(x >= y);
#if defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)same);
#elif defined(RINGWEAVE_NEON)
  return vaddvq_u32((uint32x4_t)(same & I{1, 2, 4, 8}));
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= (uint32_t)(same[i] & 1) << i;
  return bits;
#endif
#endif
}

RW_INLINE bool any_below(V x, float y) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_LT_OQ) != 0;
#else
  I less = x < splat(y);
#if defined(__AVX2__)
  return _mm256_movemask_ps((__m256)less) != 0;
#elif defined(RINGWEAVE_NEON)
  return vmaxvq_u32((uint32x4_t)less) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < W; ++i) any |= less[i];
  return any != 0;
#endif
#endif
}

// a * b + c, rounded once where the instruction set can. The builds forbid the compiler to fuse (-ffp-contract=off in
// CMakeLists.txt), so each fused sum is written here, and optimization changes no bits.
RW_INLINE V fused(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(RINGWEAVE_NEON)
  return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
RW_INLINE float fused(float a, float b, float c) {
#if defined(__AVX2__) || defined(RINGWEAVE_NEON)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

#if defined(__AVX512F__)
typedef __mmask16 Mask;
RW_INLINE Mask mask_of(uint32_t bits) { return (Mask)bits; }
RW_INLINE V select(Mask m, V a, V b) { return (V)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
RW_INLINE V no_inf(V x) {  // -inf becomes 0
  return select(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-kInf), _CMP_EQ_OQ), V{}, x);
}
#else
typedef I Mask;
RW_INLINE Mask mask_of(uint32_t bits) {
  I lane, all;
  for (int i = 0; i < W; ++i) lane[i] = 1 << i, all[i] = (int32_t)bits;
  return (all & lane) != 0;
}
RW_INLINE V select(Mask m, V a, V b) { return m ? a : b; }
RW_INLINE V no_inf(V x) { return select(x == splat(-kInf), V{}, x); }
#endif

// The W mask bits that start at a lane (a multiple of W).
RW_INLINE Mask mask_at(const uint32_t *row, int lane) {
  return mask_of((row[lane >> 5] >> (lane & 31)) & ((1u << W) - 1));
}

#if defined(__AVX512F__)
// 2^x on [0, 1): relative error 2e-7 with rounding (minimax).
RW_INLINE V exp2_fraction(V r) {
  V p = splat(1.8775767e-3f);
  p = fused(p, r, splat(8.9893401e-3f));
  p = fused(p, r, splat(5.5826318e-2f));
  p = fused(p, r, splat(2.4015361e-1f));
  p = fused(p, r, splat(6.9315308e-1f));
  return fused(p, r, splat(1.f));  // exact at 0: a row of one key keeps its score as lse
}

// 2^x for x up to 128; 0 at -inf, NaN at NaN.
RW_INLINE V exp2(V x) {
  // No clamp is needed: vreduceps returns 0 at -inf, and then vscalefps returns 0.
  V r = (V)_mm512_reduce_ps((__m512)x, 0x09);
  return (V)_mm512_scalef_ps((__m512)exp2_fraction(r), (__m512)x);
}
#else
// 2^x for x up to 128; 0 below 2^-126 and at -inf, NaN at NaN. Relative error 1.3e-7 with rounding, 6e-8 on average
// (minimax, then searched among neighbouring floats).
RW_INLINE V exp2(V x) {
  x = max(splat(-127.f), x);
  // Adding 1.5 * 2^23 rounds to an integer n, and leaves n + 127 in the lowest bits: the exponent of 2^n.
  const V shift = splat(12582912.f + 127.f), shifted = x + shift, r = x - (shifted - shift);
  V p = splat(1.32360682e-3f);
  p = fused(p, r, splat(9.66865569e-3f));
  p = fused(p, r, splat(5.55079319e-2f));
  p = fused(p, r, splat(2.40223065e-1f));
  p = fused(p, r, splat(6.93147004e-1f));
  return fused(p, r, splat(1.f)) * (V)((I)shifted << 23);
}
#endif

// tanh: relative error 3e-7, exact near 0; NaN at NaN (minimax, Eigen's coefficients).
RW_INLINE V tanh(V x) {
  x = max(splat(-8.5f), min(splat(8.5f), x));
  const V y = x * x;
  V p = splat(1.394553628e-8f), q = splat(8.015776984e-7f);
  p = fused(p, y, splat(2.102733560e-5f));
  q = fused(q, y, splat(3.326951409e-4f));
  p = fused(p, y, splat(3.520756727e-3f));
  q = fused(q, y, splat(2.597254514e-2f));
  p = fused(p, y, splat(1.340216100e-1f));
  q = fused(q, y, splat(4.673548340e-1f));
  return x * fused(p, y, splat(1.f)) / fused(q, y, splat(1.f));
}

// Load or store four channels of W / 4 rows that are four apart. Four such vectors contain W rows.
RW_INLINE V load_fourth(const char *const *row, ptrdiff_t at) {
#if defined(__AVX512F__)
  __m512 x = _mm512_castps128_ps512(_mm_loadu_ps((const float *)(row[0] + at)));
  x = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(row[4] + at)), 1);
  x = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(row[8] + at)), 2);
  return (V)_mm512_insertf32x4(x, _mm_loadu_ps((const float *)(row[12] + at)), 3);
#elif defined(__AVX2__)
  __m256 x = _mm256_castps128_ps256(_mm_loadu_ps((const float *)(row[0] + at)));
  return (V)_mm256_insertf128_ps(x, _mm_loadu_ps((const float *)(row[4] + at)), 1);
#else
  return load(row[0] + at);
#endif
}
RW_INLINE void store_fourth(char *const *row, ptrdiff_t at, V x) {
#if defined(__AVX512F__)
  _mm_storeu_ps((float *)(row[0] + at), _mm512_castps512_ps128((__m512)x));
  _mm_storeu_ps((float *)(row[4] + at), _mm512_extractf32x4_ps((__m512)x, 1));
  _mm_storeu_ps((float *)(row[8] + at), _mm512_extractf32x4_ps((__m512)x, 2));
  _mm_storeu_ps((float *)(row[12] + at), _mm512_extractf32x4_ps((__m512)x, 3));
#elif defined(__AVX2__)
  _mm_storeu_ps((float *)(row[0] + at), _mm256_castps256_ps128((__m256)x));
  _mm_storeu_ps((float *)(row[4] + at), _mm256_extractf128_ps((__m256)x, 1));
#else
  store(row[0] + at, x);
#endif
}

// Transposes 4x4 blocks in place: rows that load_fourth has read become lanes, and lanes become rows.
RW_INLINE void turn_fourths(V (&x)[4]) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), AB = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)),
                cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), CD = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  x[0] = (V)_mm512_unpacklo_pd(ab, cd), x[1] = (V)_mm512_unpackhi_pd(ab, cd);
  x[2] = (V)_mm512_unpacklo_pd(AB, CD), x[3] = (V)_mm512_unpackhi_pd(AB, CD);
#elif defined(__AVX2__)
  const __m256 a = (__m256)x[0], b = (__m256)x[1], c = (__m256)x[2], d = (__m256)x[3];
  const __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), AB = _mm256_castps_pd(_mm256_unpackhi_ps(a, b)),
                cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)), CD = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
  x[0] = (V)_mm256_unpacklo_pd(ab, cd), x[1] = (V)_mm256_unpackhi_pd(ab, cd);
  x[2] = (V)_mm256_unpacklo_pd(AB, CD), x[3] = (V)_mm256_unpackhi_pd(AB, CD);
#else
  const V ab = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), AB = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7),
          cd = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5), CD = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5), x[1] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(AB, CD, 0, 1, 4, 5), x[3] = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
#endif
}

// How a contraction multiplies: one float per lane (Single), or a pair of bfloat16 per lane (Pair).
struct Single {
  static constexpr int depth = 1;  // channels in a 4-byte element
  static constexpr int step = 1;   // rows that a contraction over rows combines
  static RW_INLINE V madd(V a, V b, V c) { return fused(a, b, c); }
};

#if defined(RW_PAIRS)
struct Pair {
  static constexpr int depth = 2, step = 2;
  static RW_INLINE V madd(V a, V b, V c) {
#if defined(__AVX512BF16__)
    return (V)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    return (V)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
  }
};
#if defined(RINGWEAVE_NEON)
#define RW_SQUARES
// Multiplies 2 rows of 4 bfloat16 in a by 2 rows in b: the sums [0][0], [0][1], [1][0] and [1][1]. BFMMLA is defined as
// BFDOT of the first pairs and then of the second ones, so it has the bits of two steps of Pair.
struct Square : Pair {
  static constexpr int depth = 4;
  static RW_INLINE V madd(V a, V b, V c) {
    return (V)vbfmmlaq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
};
#endif
// Narrows (low, high) of each lane to a pair of bfloat16.
RW_INLINE V pair(V low, V high) {
#if defined(__AVX512BF16__)
  __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                   20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (V)_mm512_permutexvar_epi16(order, both);
#else
  const bfloat16x8_t x = vcvtq_low_bf16_f32((float32x4_t)low), y = vcvtq_low_bf16_f32((float32x4_t)high);
  return (V)vzip1q_u16((uint16x8_t)x, (uint16x8_t)y);
#endif
}
// Stores a vector narrowed to bfloat16.
RW_INLINE void store_narrow(void *to, V x) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh((__m512)x);
#else
  const bfloat16x4_t h = vcvt_bf16_f32((float32x4_t)x);
#endif
  memcpy(to, &h, 2 * W);
}
#endif

}  // namespace
}  // namespace ringweave
