// Attention on Hopper: warpgroup products on tiles brought by TMA; one warpgroup a block, tiles of 64 x 64, the masked tile peeled.
// float16 or bfloat16, HEAD_DIM 64 or 128 (then a tile is two of 64 columns, one behind the other). See attention.cuh for the arrays.
// mq is the map of qkv as [B][T][3 H][HEAD_DIM], mg that of dO as [B][T][H][HEAD_DIM], boxes 64 x 1 x 64 x 1.
#pragma once
#include "attention_scores.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
constexpr int HALVES = HEAD_DIM / 64;
constexpr u32 TILE = HALVES * 8192u, TILE_D = HALVES * WG_TILE;  // bytes of a tile, and as a step of descriptors
typedef float Half[8][4];                                        // accumulator of 64 columns
DI u32 align1k(u32 a) { return (a + 1023u) & ~1023u; }
DI void load_head(u32 dst, const TMap& m, u32 bar, int head, int row, int b) {
#pragma unroll
  for (int i = 0; i < HALVES; i++) tma4(dst + 8192 * i, m, bar, 64 * i, head, row, b);
}
DI void clear(Half* acc) {
#pragma unroll
  for (int i = 0; i < HALVES; i++)
#pragma unroll
    for (int n = 0; n < 8; n++) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0.f;
}
DI void pin_all(Half* acc) {
#pragma unroll
  for (int i = 0; i < HALVES; i++) pin<32>(&acc[i][0][0]);
}
// s = rows of a times rows of b, over HEAD_DIM
DI void scores(Half& s, u64 a, u64 b) {
#pragma unroll
  for (int kk = 0; kk < HEAD_DIM / 16; kk++) {
    const u32 step = (kk / 4) * WG_TILE + (kk % 4) * WG_K;
    wgmma64_ss<0, 0>(&s[0][0], a + step, b + step, kk > 0);
  }
  wg_commit();
}
// acc += p times the tile b
DI void weigh(Half* acc, u32 (*p)[4], u64 b) {
  pin_all(acc);
  wg_fence();
#pragma unroll
  for (int i = 0; i < HALVES; i++)
#pragma unroll
    for (int kk = 0; kk < 4; kk++) wgmma64_rs<1>(&acc[i][0][0], p[kk], b + i * WG_TILE + kk * WG_R, 1);
  wg_commit();
}

// The largest scores so far: what was summed up under smaller ones is scaled down.
DI void raise(float* m, float* l, Half* acc, Half& s, float sc) {
  float mn[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float mx = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
    for (int n = 1; n < 8; n++) mx = fmaxf(mx, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    mx = fmaxf(mx, shuffle_xor(mx, 1)); mx = fmaxf(mx, shuffle_xor(mx, 2));
    mn[r] = fmaxf(m[r], mx);
  }
  if (!any_(mn[0] > m[0] || mn[1] > m[1])) return;  // the maximum rarely moves after the first tiles
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float a = ex2((m[r] - mn[r]) * sc);
    m[r] = mn[r]; l[r] *= a;
#pragma unroll
    for (int i = 0; i < HALVES; i++)
#pragma unroll
      for (int n = 0; n < 8; n++) { acc[i][n][2 * r] *= a; acc[i][n][2 * r + 1] *= a; }
  }
}
// One tile of keys.
template <int EDGE> DI void fwd_tile(Half* acc, float* m, float* l, u64 dQ, u64 dK, u64 dV, float sc, int end) {
  Half s;
  wg_fence();
  scores(s, dQ, dK);
  wg_wait<0>();
  pin<32>(&s[0][0]);
  if (EDGE) mask<8>(s, end);
  raise(m, l, acc, s, sc);
  u32 p[4][4];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float mb = m[r] * sc;
    float s0 = 0.f, s1 = 0.f;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float x = ex2(s[n][2 * r] * sc - mb), y = ex2(s[n][2 * r + 1] * sc - mb);
      s0 += x; s1 += y;
      p[n / 2][(n & 1) * 2 + r] = pack2(x, y);
    }
    l[r] += s0 + s1;
  }
  weigh(acc, p, dV);
  wg_wait<0>();
  pin_all(acc);
}
DI void attn_fwd(const TMap& mq, store_t* o, float* lse, const param_t* bias, int T, int H, float scale, u32 smem) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, tiles = (T + 63) / 64;
  const Place at = place(tiles, H, CAUSAL);
  const int b = at.b, h = at.h, m0 = at.tile * 64, last = CAUSAL ? at.tile : tiles - 1, rl = warp * 16 + g;
  const float sc = scale * LOG2E;
  const u32 sQ = align1k(smem), sK = sQ + TILE, bar = sK + 4 * TILE;  // two stages of K and V
  auto load = [&](int j, u32 st) {
    load_head(sK + st * 2 * TILE, mq, bar + 8 * st, H + h, j * 64, b);
    load_head(sK + st * 2 * TILE + TILE, mq, bar + 8 * st, 2 * H + h, j * 64, b);
  };
  if (tid == 0) {
    mbar_init(bar, 1); mbar_init(bar + 8, 1); mbar_fence();
    mbar_expect(bar, 3 * TILE);
    load_head(sQ, mq, bar, h, m0, b); load(0, 0);
    if (last > 0) { mbar_expect(bar + 8, 2 * TILE); load(1, 1); }
  }
  __syncthreads();
  const u64 dQ = wg_desc(sQ), dK = wg_desc(sK);
  const int end = (CAUSAL ? rl + 1 : T - last * 64) - 2 * t;
  Half acc[HALVES];
  float m[2] = {-INF, -INF}, l[2] = {0.f, 0.f};
  clear(acc);
  for (int j = 0; j < last; j++) {
    const u32 st = j & 1;
    mbar_wait(bar + 8 * st, (j >> 1) & 1);
    const u64 k = dK + st * 2 * TILE_D;
    fwd_tile<0>(acc, m, l, dQ, k, k + TILE_D, sc, end);
    if (j + 2 <= last) {
      __syncthreads();  // every warp is done with this stage
      if (tid == 0) { mbar_expect(bar + 8 * st, 2 * TILE); load(j + 2, st); }
    }
  }
  mbar_wait(bar + 8 * (last & 1), (last >> 1) & 1);
  const u64 k = dK + (last & 1) * 2 * TILE_D;
  fwd_tile<1>(acc, m, l, dQ, k, k + TILE_D, sc, end);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = l[r];
    sum += shuffle_xor(sum, 1); sum += shuffle_xor(sum, 2);
    const float inv = 1.f / sum;
#pragma unroll
    for (int i = 0; i < HALVES; i++)
#pragma unroll
      for (int n = 0; n < 8; n++) { acc[i][n][2 * r] *= inv; acc[i][n][2 * r + 1] *= inv; }
    if (t == 0) lse[(u64)at.bh * tiles * 64 + m0 + rl + 8 * r] = m[r] * sc + lg2(sum);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < HALVES; i++) {
    const int column = h * HEAD_DIM + 64 * i;
    if (bias) add_columns<64>(acc[i], bias + 2 * H * HEAD_DIM + column, t);
    store_rows<64>(acc[i], sQ + 8192 * i, warp * 16, o + (u64)b * T * H * HEAD_DIM + column, m0, T, H * HEAD_DIM, lane);
  }
}

template <int EDGE> DI void dq_tile(Half* acc, const float* L, const float* D, u64 dQ, u64 dG, u64 dK, u64 dV, float sc, int end) {
  Half s, dp;
  wg_fence();
  scores(s, dQ, dK);
  scores(dp, dG, dV);
  wg_wait<1>();
  pin<32>(&s[0][0]);
  weights<8>(s, L, sc, EDGE, end);
  wg_wait<0>();
  pin<32>(&dp[0][0]);
  u32 p[4][4];
  gradients<8>(p, s, dp, D);
  weigh(acc, p, dK);
  wg_wait<0>();
  pin_all(acc);
}
DI void attn_dq(const TMap& mq, const TMap& mg, const store_t* o, const store_t* dout, const param_t* bias, const float* lse, float* delta,
                const float2* turns, store_t* dqkv, float* parts, int T, int H, float scale, u32 smem) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, tiles = (T + 63) / 64;
  const Place at = place(tiles, H, CAUSAL);
  const int b = at.b, h = at.h, m0 = at.tile * 64, last = CAUSAL ? at.tile : tiles - 1, rl = warp * 16 + g;
  const int ld = 3 * H * HEAD_DIM, lo = H * HEAD_DIM;
  const float sc = scale * LOG2E;
  const u32 sQ = align1k(smem), sG = sQ + TILE, sK = sG + TILE, bar = sK + 4 * TILE;
  auto load = [&](int j, u32 st) {
    load_head(sK + st * 2 * TILE, mq, bar + 8 * st, H + h, j * 64, b);
    load_head(sK + st * 2 * TILE + TILE, mq, bar + 8 * st, 2 * H + h, j * 64, b);
  };
  if (tid == 0) {
    mbar_init(bar, 1); mbar_init(bar + 8, 1); mbar_fence();
    mbar_expect(bar, 4 * TILE);
    load_head(sQ, mq, bar, h, m0, b); load_head(sG, mg, bar, h, m0, b); load(0, 0);
    if (last > 0) { mbar_expect(bar + 8, 2 * TILE); load(1, 1); }
  }
  const u64 dQ = wg_desc(sQ), dG = wg_desc(sG), dK = wg_desc(sK);
  const int end = (CAUSAL ? rl + 1 : T - last * 64) - 2 * t;
  const u64 rows = (u64)at.bh * tiles * 64, heads = (u64)b * T * lo + h * HEAD_DIM;
  Half acc[HALVES];
  float L[2], D[2];
  clear(acc);
  row_delta(o + heads, dout + heads, bias ? bias + 2 * lo + h * HEAD_DIM : bias, delta + rows, m0 + warp * 16, T, lo, lane, D);
  L[0] = lse[rows + m0 + rl]; L[1] = lse[rows + m0 + rl + 8];
  __syncthreads();
  for (int j = 0; j < last; j++) {
    const u32 st = j & 1;
    mbar_wait(bar + 8 * st, (j >> 1) & 1);
    const u64 k = dK + st * 2 * TILE_D;
    dq_tile<0>(acc, L, D, dQ, dG, k, k + TILE_D, sc, end);
    if (j + 2 <= last) {
      __syncthreads();
      if (tid == 0) { mbar_expect(bar + 8 * st, 2 * TILE); load(j + 2, st); }
    }
  }
  mbar_wait(bar + 8 * (last & 1), (last >> 1) & 1);
  const u64 k = dK + (last & 1) * 2 * TILE_D;
  dq_tile<1>(acc, L, D, dQ, dG, k, k + TILE_D, sc, end);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < HALVES; i++) {
    const int column = h * HEAD_DIM + 64 * i;
    unrope<64>(acc[i], turns ? turns + 32 * i : turns, m0 + rl, scale, t);
    if (parts) col_part<64>(acc[i], sK + 1024 * i, parts + ((u64)b * tiles + at.tile) * ld + column, warp, lane, tid);
    store_rows<64>(acc[i], sQ + 8192 * i, warp * 16, dqkv + (u64)b * T * ld + column, m0, T, ld, lane);
  }
}

// ds = p * (dp - delta) of transposed scores; `delta`, in shared memory, is that of this thread's first column
DI void transposed_gradients(u32 (*ds)[4], u32 (*p)[4], Half& dp, u32 delta) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float2 d = lds8(delta + n * 32);
    const int h = (n & 1) * 2;
    ds[n / 2][h] = hmul2(p[n / 2][h], pack2(dp[n][0] - d.x, dp[n][1] - d.y));
    ds[n / 2][h + 1] = hmul2(p[n / 2][h + 1], pack2(dp[n][2] - d.x, dp[n][3] - d.y));
  }
}
// One tile of queries, scores transposed: a thread's rows are keys, its columns queries.
template <int EDGE> DI void dkv_tile(Half* dk, Half* dv, u64 dK, u64 dV, u64 dQ, u64 dG, u32 sL, float sc, int from, int t) {
  Half s, dp;
  wg_fence();
  scores(s, dK, dQ);
  scores(dp, dV, dG);
  wg_wait<1>();
  pin<32>(&s[0][0]);
  u32 p[4][4];
  transposed_weights<8>(p, s, sL + 8 * t, sc, EDGE, from);
  weigh(dv, p, dG);
  wg_wait<1>();
  pin<32>(&dp[0][0]);
  u32 q[4][4];
  transposed_gradients(q, p, dp, sL + 256 + 8 * t);
  weigh(dk, q, dQ);
  wg_wait<0>();
  pin_all(dk); pin_all(dv);
}
DI void attn_dkv(const TMap& mq, const TMap& mg, const float* lse, const float* delta, const float2* turns, store_t* dqkv, float* parts,
                 int T, int H, float scale, u32 smem) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, tiles = (T + 63) / 64;
  const Place at = place(tiles, H, false);
  const int b = at.b, h = at.h, n0 = at.tile * 64, first = CAUSAL ? at.tile : 0, rl = warp * 16 + g, lo = H * HEAD_DIM, ld = 3 * lo;
  const float sc = scale * LOG2E;
  const u32 sK = align1k(smem), sV = sK + TILE, sQ = sV + TILE, sL = sQ + 4 * TILE, bar = sL + 1024;  // stage: Q, dO; lse, delta
  const float *Lg = lse + (u64)at.bh * tiles * 64, *Dg = delta + (u64)at.bh * tiles * 64;
  auto load = [&](int i, u32 st) {
    const u32 q = sQ + st * 2 * TILE, l = sL + st * 512, br = bar + 8 * st;
    load_head(q, mq, br, h, i * 64, b); load_head(q + TILE, mg, br, h, i * 64, b);
    bulk1(l, Lg + i * 64, 256, br); bulk1(l + 256, Dg + i * 64, 256, br);
  };
  if (tid == 0) {
    mbar_init(bar, 1); mbar_init(bar + 8, 1); mbar_fence();
    mbar_expect(bar, 4 * TILE + 512);
    load_head(sK, mq, bar, H + h, n0, b); load_head(sV, mq, bar, 2 * H + h, n0, b); load(first, 0);
    if (first + 1 < tiles) { mbar_expect(bar + 8, 2 * TILE + 512); load(first + 1, 1); }
  }
  __syncthreads();
  const u64 dK = wg_desc(sK), dV = wg_desc(sV), dQ = wg_desc(sQ);
  Half dk[HALVES], dv[HALVES];
  clear(dk); clear(dv);
  mbar_wait(bar, 0);
  dkv_tile<CAUSAL>(dk, dv, dK, dV, dQ, dQ + TILE_D, sL, sc, rl - 2 * t, t);
  for (int i = first + 1; i < tiles; i++) {
    const u32 k = i - first, st = k & 1;
    if (i + 1 < tiles) {  // refill the stage that the last tile used
      __syncthreads();
      if (tid == 0) { mbar_expect(bar + 8 * (st ^ 1), 2 * TILE + 512); load(i + 1, st ^ 1); }
    }
    mbar_wait(bar + 8 * st, (k >> 1) & 1);
    dkv_tile<0>(dk, dv, dK, dV, dQ + st * 2 * TILE_D, dQ + st * 2 * TILE_D + TILE_D, sL + st * 512, sc, 0, t);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < HALVES; i++) {
    const int column = h * HEAD_DIM + 64 * i;
    float* pk = parts + ((u64)b * tiles + at.tile) * ld + lo + column;
    store_t* out = dqkv + (u64)b * T * ld + lo + column;
    if (!CAUSAL) { clear_rows<64>(dk[i], n0 + rl, T); clear_rows<64>(dv[i], n0 + rl, T); }
    unrope<64>(dk[i], turns ? turns + 32 * i : turns, n0 + rl, scale, t);
    if (parts) {
      col_part<64>(dk[i], sQ + 2048 * i, pk, warp, lane, tid);
      col_part<64>(dv[i], sQ + 2048 * i + 1024, pk + lo, warp, lane, tid);
    }
    store_rows<64>(dk[i], sK + 8192 * i, warp * 16, out, n0, T, ld, lane);
    store_rows<64>(dv[i], sV + 8192 * i, warp * 16, out + lo, n0, T, ld, lane);
  }
}
