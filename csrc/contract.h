// The register-blocked contraction that the kernels are built on:
//     acc[i][lane] = sum_k a(i, k) * b[k][lane]
// a is a tile in its memory layout, read one element at a time and broadcast. b is a panel of lanes, P vectors wide, of
// which the contraction uses N vectors.
#pragma once
#include "lanes.h"

namespace ringweave {
namespace {

template <int N>
struct Int {
  static constexpr int value = N;
};

template <int M, int N>
RW_INLINE void clear(V (&acc)[M][N]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[i][j] = V{};
}

#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__x86_64__)
#define RW_BLOCK_OF_12
// The loop of `contract` for 6 rows and 2 vectors, with all 16 registers of AVX2. In assembly, since compilers spill a
// sum in some of the places where they inline the loop, which then takes half as long again. Sums begin at 0, and depth
// is a positive multiple of 4.
template <bool Rows, int P>
RW_INLINE void block_of_12(const char *a, ptrdiff_t ld, int depth, const float *b, V (&acc)[6][2]) {
  const char *c = a + 3 * ld;
  int64_t left = depth;
#define RW_ZERO(i) "vxorps %" #i ", %" #i ", %" #i "\n\t"
#define RW_VECTORS(k) "vmovups " k "*%c[step](%[b]), %%ymm12\n\tvmovups " k "*%c[step]+32(%[b]), %%ymm13\n\t"
#define RW_PRODUCT(at, t, x, y)                                     \
  "vbroadcastss " at ", %%ymm" t "\n\tvfmadd231ps %%ymm12, %%ymm" t \
  ", %" #x "\n\tvfmadd231ps %%ymm13, %%ymm" t ", %" #y "\n\t"
#define RW_SIX(a0, a1, a2, a3, a4, a5)                                                               \
  RW_PRODUCT(a0, "14", 0, 1) RW_PRODUCT(a1, "15", 2, 3) RW_PRODUCT(a2, "14", 4, 5)                     \
  RW_PRODUCT(a3, "15", 6, 7) RW_PRODUCT(a4, "14", 8, 9) RW_PRODUCT(a5, "15", 10, 11)
#define RW_OF_ROWS(k, at)                                                                               \
  RW_VECTORS(k) RW_SIX(at "(%[a])", at "(%[a],%[ld])", at "(%[a],%[ld],2)", at "(%[c])", at "(%[c],%[ld])", \
                       at "(%[c],%[ld],2)")
#define RW_OF_COLUMN(k) \
  RW_VECTORS(k) RW_SIX("(%[a])", "4(%[a])", "8(%[a])", "12(%[a])", "16(%[a])", "20(%[a])") "add %[ld], %[a]\n\t"
#define RW_BLOCK_LOOP(body, ends)                                                                                  \
  asm(RW_ZERO(0) RW_ZERO(1) RW_ZERO(2) RW_ZERO(3) RW_ZERO(4) RW_ZERO(5) RW_ZERO(6) RW_ZERO(7) RW_ZERO(8) RW_ZERO(9)  \
      RW_ZERO(10) RW_ZERO(11) "1:\n\t" body ends "add $4*%c[step], %[b]\n\tsub $4, %[left]\n\tjnz 1b"              \
      : "=&x"(acc[0][0]), "=&x"(acc[0][1]), "=&x"(acc[1][0]), "=&x"(acc[1][1]), "=&x"(acc[2][0]), "=&x"(acc[2][1]), \
        "=&x"(acc[3][0]), "=&x"(acc[3][1]), "=&x"(acc[4][0]), "=&x"(acc[4][1]), "=&x"(acc[5][0]), "=&x"(acc[5][1]), \
        [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [left] "+r"(left)                                                    \
      : [ld] "r"(ld), [step] "i"(4 * P * W)                                                                        \
      : "ymm12", "ymm13", "ymm14", "ymm15", "cc", "memory")
  if constexpr (Rows)
    RW_BLOCK_LOOP(RW_OF_ROWS("0", "0") RW_OF_ROWS("1", "4") RW_OF_ROWS("2", "8") RW_OF_ROWS("3", "12"),
                  "add $16, %[a]\n\tadd $16, %[c]\n\t");
  else
    RW_BLOCK_LOOP(RW_OF_COLUMN("0") RW_OF_COLUMN("1") RW_OF_COLUMN("2") RW_OF_COLUMN("3"), "");
#undef RW_ZERO
#undef RW_VECTORS
#undef RW_PRODUCT
#undef RW_SIX
#undef RW_OF_ROWS
#undef RW_OF_COLUMN
#undef RW_BLOCK_LOOP
}
#endif

#if defined(RW_SQUARES)
// The lower or the upper halves of two vectors, and the elements of these halves in turn.
RW_INLINE V halves(V x, V y, int upper) {
  return upper ? __builtin_shufflevector(x, y, 2, 3, 6, 7) : __builtin_shufflevector(x, y, 0, 1, 4, 5);
}
RW_INLINE V zip(V x, V y, int upper) {
  return upper ? __builtin_shufflevector(x, y, 2, 6, 3, 7) : __builtin_shufflevector(x, y, 0, 4, 1, 5);
}
RW_INLINE V load_lower(const char *p) {
  float32x2_t x;
  memcpy(&x, p, sizeof x);
  return (V)vcombine_f32(x, vdup_n_f32(0));
}

// The loop of `contract` for an even number of rows and an even depth, with the same bits. Until the end, acc[i] and
// acc[i + 1] are the squares of rows i and i + 1 with the lower and with the upper lanes.
template <bool Rows, int P, int M, int N>
RW_INLINE void squares(const char *a, ptrdiff_t ld, int depth, const float *b, V (&acc)[M][N]) {
  // Moves other values to memory, and keeps the rows' offsets local to the block; else GCC spills sums in the loop.
  asm volatile("" : "+r"(ld) : : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
               "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28",
               "v29", "v30", "v31");
  clear(acc);
  for (int k = 0; k < depth; k += 2) {
    V rows[M / 2];  // steps k and k + 1 of two rows each
#pragma GCC unroll 8
    for (int i = 0; i < M; i += 2) {
      const char *at = a + i * (Rows ? ld : 4);
      const V x = load_lower(at), y = load_lower(at + ld);
      rows[i / 2] = Rows ? halves(x, y, 0) : zip(x, y, 0);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const V x = load(b + j * W), y = load(b + (P + j) * W), lower = zip(x, y, 0), upper = zip(x, y, 1);
#pragma GCC unroll 8
      for (int i = 0; i < M; i += 2) {
        acc[i][j] = Square::madd(rows[i / 2], lower, acc[i][j]);
        acc[i + 1][j] = Square::madd(rows[i / 2], upper, acc[i + 1][j]);
      }
    }
    a += 2 * (Rows ? 4 : ld);
    b += 2 * P * W;
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i += 2)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const V lower = acc[i][j], upper = acc[i + 1][j];
      acc[i][j] = halves(lower, upper, 0), acc[i + 1][j] = halves(lower, upper, 1);
    }
}
#endif

// Rows: element (i, k) is at a + i * ld + 4k. Otherwise it is at a + 4i + k * ld.
template <class Op, bool Rows, int P, int M, int N>
RW_INLINE void contract(const char *a, ptrdiff_t ld, int depth, const float *b, V (&acc)[M][N]) {
  int done = 0;
#if defined(RW_BLOCK_OF_12)
  if constexpr (M == 6 && N == 2)
    if ((done = depth & ~3)) block_of_12<Rows, P>(a, ld, done, b, acc);
#elif defined(RW_SQUARES)
  if constexpr (Op::depth == 2 && M % 2 == 0)
    if ((done = depth & ~1)) squares<Rows, P>(a, ld, done, b, acc);
#endif
  if (!done) clear(acc);
  a += done * (Rows ? 4 : ld), b += (ptrdiff_t)done * P * W;
  for (int k = done; k < depth; ++k) {
    V bk[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) bk[j] = load(b + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      V ai = splat_at(a + (Rows ? i * ld : 4 * i));
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) acc[i][j] = Op::madd(ai, bk[j], acc[i][j]);
    }
    a += Rows ? 4 : ld;
    b += P * W;
  }
}

#if defined(RW_SQUARES)
// Random numbers below n, for checks of the processor.
struct Draw {
  uint32_t state = 1;
  uint32_t operator()(uint32_t n) { return (state = state * 1664525 + 1013904223) / 65536 % n; }
};
// Whether the processor's BFMMLA has the bits of BFDOT. Otherwise a decoding step would not have the bits of forward.
inline bool squares_agree() {
  static const bool agree = [] {
    bool same = true;
    Draw draw;
    // least exponent and number of exponents: in the middle, underflow, overflow, and all of them
    const uint32_t kinds[][2] = {{115, 24}, {52, 20}, {180, 20}, {0, 256}};
    for (int round = 0; round < 256; ++round) {
      uint16_t a[2][16], b[8][2 * W];
      const auto [least, some] = kinds[round % 4];
      const auto fill = [&, least = least, some = some](uint16_t &x) {
        x = (uint16_t)(draw(2) << 15 | (least + draw(some)) << 7 | draw(128));
      };
      for (auto &row : a)
        for (uint16_t &x : row) fill(x);
      for (auto &row : b)
        for (uint16_t &x : row) fill(x);
      V both[2][1], one[1][1];
      contract<Pair, true, 1>((const char *)a, sizeof a[0], 8, (const float *)b, both);
      for (int i = 0; i < 2; ++i) {
        contract<Pair, true, 1>((const char *)a[i], sizeof a[0], 8, (const float *)b, one);
        same &= !memcmp(both[i], one, sizeof one);
      }
    }
    return same;
  }();
  return agree;
}
#endif

// Number of rows in a block, by panel width: as many as fit the registers together with one row of b.
template <class Op, int N>
struct Block {
#if defined(__AVX512F__)
  // measured: eight sums for one vector of lanes wait for each other, but more rows of pairs take longer to read
  static constexpr int rows = N == 4 ? 6 : N == 1 && Op::depth == 1 ? 16 : 8;
#elif defined(RINGWEAVE_NEON)
  static constexpr int rows = N == 4 ? 6 : 8;
#elif defined(__AVX2__)
  static constexpr int rows = N == 2 ? 6 : 8;
#else
  static constexpr int rows = N == 2 ? 4 : 8;
#endif
};

// For each block of rows: calls begin(block size, row), contracts, and calls end(block size, row, acc). The products
// are summed from 0, since adding each product to a large running sum would round every time. The block size is even,
// except for a last single row.
template <class Op, bool Rows, int N, int P = N, class Begin, class End>
RW_INLINE void sweep(const char *a, ptrdiff_t ld, int rows, int depth, const float *b, Begin begin, End end) {
  const ptrdiff_t step = Rows ? ld : 4;
  int r = 0;
#define RW_BLOCK(M)                                         \
  {                                                         \
    V acc[M][N];                                            \
    begin(Int<M>(), r);                                     \
    contract<Op, Rows, P>(a + r * step, ld, depth, b, acc); \
    end(Int<M>(), r, acc);                                  \
    r += M;                                                 \
  }
  constexpr int full = Block<Op, N>::rows;
  for (; r + full <= rows;) RW_BLOCK(full)
  if (full > 8 && r + 8 <= rows) RW_BLOCK(8)
  if (full > 4 && r + 4 <= rows) RW_BLOCK(4)
  if (r + 2 <= rows) RW_BLOCK(2)
  if (r < rows) RW_BLOCK(1)
#undef RW_BLOCK
}

// Nothing to do before a block.
struct Nothing {
  template <class Block>
  RW_INLINE void operator()(Block, int) const {}
};

// Adds a block of products to out.
template <int P, int M, int N>
RW_INLINE void add_block(float *out, int r, const V (&acc)[M][N]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      float *to = out + ((r + i) * P + j) * W;
      store(to, load(to) + acc[i][j]);
    }
}

}  // namespace
}  // namespace ringweave
