// AMX: products of bfloat16 in tiles of 16 rows of 64 bytes. This file has the six instructions, or a model of them
// (RINGWEAVE_MODEL) for processors with AVX-512-BF16 but without tiles.
#pragma once
#include "contract.h"

namespace ringweave {
namespace {

#if defined(RW_TILES)
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

// A tiled contraction sums 32 products, even and odd ones separately, and then adds them to the previous sum.
template <class Op>
constexpr bool is_tiled = Op::step == 32;

// A sum of products a(k) b(k), in the order and with the rounding of Op.
template <class Op, bool Tiled = is_tiled<Op>>
struct Sum {
  V x;
  RW_INLINE void begin(V before) { x = before; }
  RW_INLINE void add(V a, V b) { x = Op::madd(a, b, x); }
  RW_INLINE void fold() {}
  RW_INLINE V end() { return x; }
};

#if defined(RW_TILES)
constexpr int kTile = 16;  // number of rows, and of 4-byte elements in a row

struct Tiled : Pair {
  static constexpr int step = 2 * kTile, rows = kTile;
};

// Computes the bits of a tiled sum without tiles. VDPBF16PS rounds and flushes like TDPBF16PS, and a half that is 0
// adds nothing.
template <class Op>
struct Sum<Op, true> {
  V total, even, odd;
  RW_INLINE void begin(V before) { total = before, even = odd = V{}; }
  RW_INLINE void add(V a, V b) {
    even = Pair::madd((V)((U)a & 0xffffu), (V)((U)b & 0xffffu), even);
    odd = Pair::madd((V)((U)a & 0xffff0000u), (V)((U)b & 0xffff0000u), odd);
  }
  RW_INLINE void fold() {
    const auto flushed = [](V x) __attribute__((always_inline)) { return Pair::madd(V{}, V{}, x); };
    total = flushed(total + flushed(even + odd)), even = odd = V{};
  }
  RW_INLINE V end() {
    fold();
    return total;
  }
};

// Use of the tiles: 0 to 3 are sums, 4 and 5 operands; 6 and 7 are operands for the remainder of `depth` modulo 32.
struct alignas(64) TileShapes {
  uint8_t palette = 0, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};  // bytes of a row
  uint8_t rows[16] = {};
  TileShapes() {}
  explicit TileShapes(int depth) : palette(1) {
    const int rest = depth % (2 * kTile) ? depth % (2 * kTile) : 2 * kTile;
    for (int t = 0; t < 8; ++t) rows[t] = kTile, bytes[t] = 64;
    bytes[6] = (uint16_t)(2 * rest), rows[7] = (uint8_t)(rest / 2);
  }
};

#if !defined(RINGWEAVE_MODEL)
// The instructions as inline assembly, since some compilers' intrinsics do not declare that memory is read.
RW_INLINE void begin_tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
RW_INLINE void end_tiles() { asm volatile("tilerelease"); }
template <int T>
RW_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
RW_INLINE void tile_load(const void *p, ptrdiff_t ld) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(ld), "i"(T) : "memory");
}
template <int T>
RW_INLINE void tile_store(void *p, ptrdiff_t ld) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(ld), "i"(T) : "memory");
}
// c += a b; a row of b contains pairs of rows.
template <int C, int A, int B>
RW_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#else
// A model after the pseudocode in Intel's manual, row by row. Uses that would be an invalid opcode trap.
struct TileModel {
  TileShapes shapes;
  alignas(64) char tile[8][kTile][64];
};
thread_local TileModel tiles;

inline void begin_tiles(const TileShapes &shapes) {
  tiles.shapes = shapes;
  memset((void *)tiles.tile, 0, sizeof tiles.tile);
}
inline void end_tiles() { tiles.shapes = {}; }
inline void must(bool valid) {
  if (!valid) __builtin_trap();
}
template <int T>
inline void tile_zero() {
  must(tiles.shapes.palette);
  memset(tiles.tile[T], 0, sizeof tiles.tile[T]);
}
template <int T>
inline void tile_load(const void *p, ptrdiff_t ld) {
  tile_zero<T>();
  for (int r = 0; r < tiles.shapes.rows[T]; ++r)
    memcpy(tiles.tile[T][r], (const char *)p + r * ld, tiles.shapes.bytes[T]);
}
template <int T>
inline void tile_store(void *p, ptrdiff_t ld) {
  must(tiles.shapes.palette);
  for (int r = 0; r < tiles.shapes.rows[T]; ++r) memcpy((char *)p + r * ld, tiles.tile[T][r], tiles.shapes.bytes[T]);
}
__attribute__((noinline)) void model_multiply(char (*c)[64], const char (*a)[64], const char (*b)[64], int rows,
                                              int depth) {
  for (int m = 0; m < rows; ++m) {
    V even = V{}, odd = V{};
    for (int k = 0; k < depth; ++k) {
      const U x = (U)splat_at(a[m] + 4 * k), y = (U)load(b[k]);
      even = (V)_mm512_fmadd_ps((__m512)(x << 16), (__m512)(y << 16), (__m512)even);
      odd = (V)_mm512_fmadd_ps((__m512)(x & 0xffff0000u), (__m512)(y & 0xffff0000u), (__m512)odd);
    }
    store(c[m], load(c[m]) + (even + odd));
  }
}
template <int C, int A, int B>
inline void tile_multiply() {
  const TileShapes &s = tiles.shapes;
  must(s.palette && s.rows[A] == s.rows[C] && s.bytes[B] == s.bytes[C] && s.bytes[A] == 4 * s.rows[B] && A != B &&
       B != C && C != A);
  // round to nearest, treat denormal operands and results as 0, mask all exceptions
  uint32_t before, during = 0x9fc0;
  asm volatile("stmxcsr %0\n\tldmxcsr %1" : "=m"(before) : "m"(during) : "memory");
  model_multiply(tiles.tile[C], tiles.tile[A], tiles.tile[B], s.rows[A], s.rows[B]);
  asm volatile("ldmxcsr %0" ::"m"(before) : "memory");
}
#endif

// Calls f(Int<0>()) to f(Int<N - 1>()).
template <int N, class F>
RW_INLINE void each_tile(F f) {
  f(Int<0>());
  if constexpr (N > 1) f(Int<1>());
  if constexpr (N > 2) f(Int<2>()), f(Int<3>());
}

// Adds tile 4 (or tile 6 for the remainder) times N adjacent tiles.
template <int N, int A = 4>
RW_INLINE void multiply_by(const float *b, int width) {
  each_tile<N>([&](auto j) __attribute__((always_inline)) {
    tile_load<A + 1>(b + j.value * W, 4 * width);
    tile_multiply<j.value, A, A + 1>();
  });
}

// Products of n rows in their memory layout, 16 at a time, with N vectors of a panel of P vectors.
template <int N, int P>
inline void tile_products(const char *a, ptrdiff_t ld, int n, int depth, const float *b, float *to) {
  for (int r = 0; r < n; r += kTile, a += kTile * ld, to += kTile * N * W) {
    each_tile<N>([](auto j) __attribute__((always_inline)) { tile_zero<j.value>(); });
    int c = 0;
    for (; c + 2 * kTile <= depth; c += 2 * kTile) {
      tile_load<4>(a + 2 * c, ld);
      multiply_by<N>(b + (ptrdiff_t)c / 2 * P * W, P * W);
    }
    if (c < depth) {
      tile_load<6>(a + 2 * c, ld);
      multiply_by<N, 6>(b + (ptrdiff_t)c / 2 * P * W, P * W);
    }
    each_tile<N>([&](auto j) __attribute__((always_inline)) { tile_store<j.value>(to + j.value * W, 4 * N * W); });
  }
}

// Calls f(block of one row, row, acc) on rows of products, as `sweep` calls `end`.
template <int N, class F>
RW_INLINE void each_row(const float *from, int n, F f) {
  for (int r = 0; r < n; ++r) {
    V acc[1][N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[0][j] = load(from + (r * N + j) * W);
    f(Int<1>(), r, acc);
  }
}

// Number of tiles that the pairs of n rows of N vectors fill; writes zeros after the last pair.
template <int N>
inline int tile_steps(float *pairs, int n) {
  const int steps = (n + 2 * kTile - 1) / (2 * kTile), last = (n + 1) / 2;
  memset((void *)(pairs + last * N * W), 0, 4 * (size_t)(steps * kTile - last) * N * W);
  return steps;
}

// Sums over rows for 16 channels from turn_pairs, with N vectors of pairs.
template <int N>
inline void tile_sums(const char *a, ptrdiff_t ld, int steps, const float *pairs, float *to) {
  each_tile<N>([](auto j) __attribute__((always_inline)) { tile_zero<j.value>(); });
  for (int i = 0; i < steps; ++i, a += ld, pairs += kTile * N * W) {
    tile_load<4>(a, 64);
    multiply_by<N>(pairs, N * W);
  }
  each_tile<N>([&](auto j) __attribute__((always_inline)) { tile_store<j.value>(to + j.value * W, 4 * N * W); });
}

// Rearranges pairs of rows for a contraction over rows: each row of the returned tile has 32 rows, as 16 pairs for each
// channel. Zeros are written after the last row.
inline Tile turn_pairs(Tile pairs, int n, int width, char *to) {
  const int blocks = (n + 2 * kTile - 1) / (2 * kTile), last = (n + 1) / 2;
  char *from = const_cast<char *>(pairs.data);
  memset(from + last * pairs.ld, 0, (size_t)((blocks * kTile - last) * pairs.ld));
  const Tile turned{to, (ptrdiff_t)pad_lanes(width) * 64};
  for (int i = 0; i < blocks * kTile; i += 4, from += 4 * pairs.ld)
    for (int c = 0; c < width; c += 4) {
      const char *at = from + 4 * c;
      turn4(at, at + pairs.ld, at + 2 * pairs.ld, at + 3 * pairs.ld,
            to + i / kTile * turned.ld + c * 64 + i % kTile * 4, 64);
    }
  return turned;
}

// Whether the processor's tiles sum like Sum does. Otherwise a decoding step would not have the same bits as forward.
inline bool tiles_agree() {
  static const bool agree = [] {
    bool same = true;
    begin_tiles(TileShapes(2 * kTile));
    Draw draw;
    // exponents in the middle, exponents with products that underflow, denormals among others, and ones that overflow
    const struct {
      uint32_t least, some, odd, before;
    } kinds[] = {{115, 24, 127, 115}, {60, 16, 64, 1}, {56, 80, 0, 1}, {180, 20, 255, 220}};
    for (int round = 0; round < 64; ++round) {
      uint16_t ab[2][kTile][2 * kTile];
      float c[kTile][kTile], got[kTile][kTile];
      const auto kind = kinds[round % 4];
      for (auto &of : ab)
        for (auto &row : of)
          for (uint16_t &x : row) {
            const uint32_t exponent = draw(64) ? kind.least + draw(kind.some) : kind.odd;
            x = (uint16_t)(draw(2) << 15 | exponent << 7 | (exponent == 255 ? 0 : draw(128)));
          }
      for (auto &row : c)
        for (float &x : row)
          x = float_of(draw(2) << 31 | (kind.before + draw(24)) << 23 | draw(1 << 16) << 7);
      tile_load<0>(c, 64), tile_load<4>(ab[0], 64), tile_load<5>(ab[1], 64);
      tile_multiply<0, 4, 5>();
      tile_store<0>(got, 64);
      for (int m = 0; m < kTile; ++m) {
        Sum<Tiled> sum;
        sum.begin(load(c[m]));
        for (int k = 0; k < kTile; ++k) sum.add(splat_at((const char *)(ab[0][m] + 2 * k)), load(ab[1][k]));
        const V want = sum.end();
        for (int n = 0; n < kTile; ++n)
          same &= got[m][n] == want[n] || (got[m][n] != got[m][n] && want[n] != want[n]);
      }
    }
    end_tiles();
    return same;
  }();
  return agree;
}

// Multiplies tiles in a loop; returns the FLOP.
inline int64_t tile_rounds(int64_t rounds) {
  begin_tiles(TileShapes(2 * kTile));
  for (int64_t r = 0; r < rounds; ++r)
    each_tile<4>([](auto j) __attribute__((always_inline)) { tile_multiply<j.value, 4, 5>(); });
  end_tiles();
  return rounds * 4 * 2 * kTile * kTile * 2 * kTile;
}
#endif

}  // namespace
}  // namespace ringweave
