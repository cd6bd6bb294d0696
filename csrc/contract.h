// The register-blocked contraction that the kernels are built on:
//     acc[i][lane] += sum_k a(i, k) * b[k][lane]
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

// Rows: element (i, k) is at a + i * ld + 4k. Otherwise it is at a + 4i + k * ld.
template <class Op, bool Rows, int P, int M, int N>
RW_INLINE void contract(const char *a, ptrdiff_t ld, int depth, const float *b, V (&acc)[M][N]) {
  for (int k = 0; k < depth; ++k) {
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

// Number of rows in a block, by panel width: as many as fit the registers together with one row of b.
template <int N>
struct Block {
#if defined(__AVX512F__) || defined(RINGWEAVE_NEON)
  static constexpr int rows = N == 4 ? 6 : N == 2 ? 8 : 8;
#elif defined(__AVX2__)
  static constexpr int rows = N == 2 ? 6 : 8;
#else
  static constexpr int rows = N == 2 ? 4 : 8;
#endif
};

// For each block of rows: calls begin(block size, row, acc), contracts, and calls end(block size, row, acc).
// The block size is even, except for a last single row.
template <class Op, bool Rows, int N, int P = N, class Begin, class End>
RW_INLINE void sweep(const char *a, ptrdiff_t ld, int rows, int depth, const float *b, Begin begin, End end) {
  const ptrdiff_t step = Rows ? ld : 4;
  int r = 0;
#define RW_BLOCK(M)                                         \
  {                                                         \
    V acc[M][N];                                            \
    begin(Int<M>(), r, acc);                                \
    contract<Op, Rows, P>(a + r * step, ld, depth, b, acc); \
    end(Int<M>(), r, acc);                                  \
    r += M;                                                 \
  }
  constexpr int full = Block<N>::rows;
  for (; r + full <= rows;) RW_BLOCK(full)
  if (full > 4 && r + 4 <= rows) RW_BLOCK(4)
  if (r + 2 <= rows) RW_BLOCK(2)
  if (r < rows) RW_BLOCK(1)
#undef RW_BLOCK
}

template <int M, int N>
RW_INLINE void clear(V (&acc)[M][N]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[i][j] = V{};
}

// Adds a block of products to out. The products were summed from 0, since adding each product to the large running sum
// would round every time.
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
