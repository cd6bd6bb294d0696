// The rate of a loop of fused multiply-adds in registers on one thread. bench/fma.py compiles it for an instruction set.
#include <stdint.h>
#include <time.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define CHAINS 24  // sums at a time, which fill 32 registers
#else
#define CHAINS 12
#endif
typedef float V __attribute__((vector_size(BYTES)));

// Without this the compiler moves products out of the loop, and only additions are timed.
static inline V opaque(V x) {
#if defined(__x86_64__)
#if defined(__AVX512F__)
  __asm__ volatile("" : "+v"(x));
#else
  __asm__ volatile("" : "+x"(x));
#endif
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(x));
#endif
  return x;
}

static inline V multiply_add(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Products of bfloat16: a float of the sum takes `DEPTH` of them.
static inline V multiply_add_pairs(V a, V b, V c) {
#if defined(__AVX512BF16__)
#define DEPTH 2
  return (V)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define DEPTH 4
  return (V)vbfmmlaq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
#define DEPTH 1
  return multiply_add(a, b, c);
#endif
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define LOOP(name, madd)                                       \
  static float name(int64_t rounds) {                          \
    volatile float half = 0.5f; /* unknown to the compiler */  \
    V acc[CHAINS], a = {0}, b = {0}, sum = {0};                \
    a += half, b += half;                                      \
    _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; ++i)  \
        acc[i] = b * half;                                     \
    for (int64_t r = 0; r < rounds; ++r) {                     \
      a = opaque(a);                                           \
      _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; ++i) \
          acc[i] = madd(a, b, acc[i]);                         \
    }                                                          \
    _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; ++i)  \
        sum += acc[i];                                         \
    return sum[0];                                             \
  }
LOOP(singles, multiply_add)
LOOP(pairs, multiply_add_pairs)

// FLOP/s of some seconds of float32, or of bfloat16 where the instruction set multiplies it.
double fma_rate(double seconds, int bfloat16) {
  const int64_t rounds = 20000, lanes = BYTES / 4;
  volatile float kept = 0;
  double flop = 0, begun = now(), spent = 0;
  for (; spent < seconds; spent = now() - begun) {
    kept = kept + (bfloat16 ? pairs(rounds) : singles(rounds));
    flop += (double)(rounds * CHAINS * lanes * 2 * (bfloat16 ? DEPTH : 1));
  }
  return flop / spent;
}
