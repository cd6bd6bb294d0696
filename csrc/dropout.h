// Which weights dropout keeps: 16 random bits for each (batch, head, query, key), recomputed where they are needed.
//
// Philox 4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011). The
// counter is (key >> 3, query, head, batch), and its four words are the bits of eight neighbouring keys.
#pragma once
#include "lanes.h"

namespace ringweave {
namespace {

struct DropoutMemory {
  PerLane<int32_t> queries, heads;
  uint32_t *bits, *turned;
  uint8_t *dead;
  DropoutMemory() = default;
  DropoutMemory(const Problem &pb, Carve &m, int lanes) {
    if (!pb.score_terms.drop) lanes = 0;
    const int keys = lanes ? pb.plan.kv_tile : 0;
    queries = {m, (size_t)lanes}, heads = {m, (size_t)lanes};
    bits = m.take<uint32_t>((size_t)keys * ((lanes + 31) / 32));
    turned = m.take<uint32_t>((size_t)lanes * ((keys + 31) / 32));
    dead = m.take<uint8_t>(lanes);
  }
};

// The words of W counters that differ in the query and the head. They are computed in 64-bit lanes, with even and odd
// counters in separate vectors. Only the lower half of a lane is meaningful; the upper half is arbitrary.
RW_INLINE void philox(uint32_t keys, U queries, U heads, uint32_t batch, uint64_t seed, U (&words)[4]) {
  L c0[2], c1[2], c2[2], c3[2];
  for (int i = 0; i < 2; ++i) {
    c0[i] = L{} + keys, c3[i] = L{} + batch;
    c1[i] = (L)queries >> (32 * i), c2[i] = (L)heads >> (32 * i);
  }
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const L a = low_product(c0[i], L{} + 0xD2511F53u), b = low_product(c2[i], L{} + 0xCD9E8D57u);
      c0[i] = (b >> 32) ^ c1[i] ^ (uint64_t)k0;
      c2[i] = (a >> 32) ^ c3[i] ^ (uint64_t)k1;
      c1[i] = b, c3[i] = a;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  auto both = [](const L(&c)[2]) { return (U)((c[0] & 0xffffffffu) | c[1] << 32); };
  words[0] = both(c0), words[1] = both(c1), words[2] = both(c2), words[3] = both(c3);
}

// The bits of kept pairs by key and lane, in the layout of a tile's mask in forward.
__attribute__((noinline)) inline TileMask kept_pairs(const Problem &pb, const Lanes &queries, int64_t first, int keys,
                                                     const DropoutMemory &m) {
  const ScoreTerms &score_terms = pb.score_terms;
  const int words = (queries.count + 31) / 32;
  m.queries.fill(queries.count,
                 [&](int lane) { return score_terms.query_at(queries.batch, queries.first + lane % queries.rows); });
  m.heads.fill(queries.count, [&](int lane) {
    return score_terms.heads[queries.head + smaller(lane / queries.rows, queries.heads - 1)];
  });
  memset(m.bits, 0, 4 * (size_t)keys * words);
  for (int lane = 0; lane < queries.count; lane += W) {
    U q, h;
    memcpy(&q, m.queries + lane, sizeof q), memcpy(&h, m.heads + lane, sizeof h);
    int32_t eight = 0;
    uint32_t kept[8];
    for (int r = 0; r < keys; ++r) {
      const int32_t key = score_terms.key_at(queries.batch, first + r);
      if (r == 0 || key >> 3 != eight) {
        eight = key >> 3;
        U random[4];
        philox((uint32_t)eight, q, h, (uint32_t)queries.batch, score_terms.seed, random);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)  // the upper 16 bits decide, since the threshold's lower bits are 0
          kept[i] = at_least(i & 1 ? random[i / 2] : random[i / 2] << 16, score_terms.drop << 16);
      }
      m.bits[(ptrdiff_t)r * words + (lane >> 5)] |= kept[key & 7] << (lane & 31);
    }
  }
  return {m.bits, words, nullptr};
}

// The bits of one head's kept pairs by query and key.
inline TileMask kept_keys(const Problem &pb, const Lanes &queries, int64_t first, int keys, const DropoutMemory &m) {
  const Lanes across{queries.batch, 0, first, 1, keys, pad_lanes(keys)};
  const TileMask kept = kept_pairs(pb, queries, first, keys, m);
  return turn_mask(kept.rows, kept.words, across, queries.rows, m.turned, m.dead);
}

}  // namespace
}  // namespace ringweave
