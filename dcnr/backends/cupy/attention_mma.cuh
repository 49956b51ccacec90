// Attention with mma.sync m16n8k16 (sm_80 and later), float16 or bfloat16, HEAD_DIM 32, 64, 96 or 128. See attention.cuh for the arrays.
// Blocks of four warps own 64 rows (queries; keys in dK and dV), each warp 16 of them; tiles of the other side come by cp.async.
// Every output is summed by one warp in a fixed order.
#pragma once
#include "attention_scores.cuh"
constexpr int DIM = HEAD_DIM, STEPS = DIM / 16, TILES_N = DIM / 8;
constexpr int WAY_SIDE = DIM <= 64 ? 64 : 32, BACK_SIDE = DIM <= 96 ? 32 : 16;  // rows of a tile of the other side: registers set the limit
constexpr u32 OWN = 64 * DIM * 2;                               // bytes

template <int ROWS> DI void load_tile(u32 dst, const store_t* src, int row0, int T, int ld, int tid) {
#pragma unroll
  for (int i = 0; i < ROWS * DIM / 8 / 128; i++) {
    const int idx = tid + i * 128, r = idx / (DIM / 8), c = idx % (DIM / 8);
    const bool ok = row0 + r < T;
    cp16(dst + swz<DIM>(r, c), src + (u64)(ok ? row0 + r : 0) * ld + c * 8, ok);
  }
}
// `columns` of 16 further on, in the swizzled tile: chunks are permuted within whole groups of 4 or 8, so one xor and one constant do it
DI u32 step(u32 address, int columns) {
  constexpr int WITHIN = DIM % 64 ? 1 : 3;
  return (address ^ ((columns & WITHIN) << 5)) + (columns & ~WITHIN) * 32;
}
// A operand: rows r0 … r0 + 15 of a tile
DI void frag_a(u32* f, u32 tile, int r0, int kk, int lane) { ldsm4(f, step(tile + swz<DIM>(r0 + (lane & 15), lane >> 4), kk)); }
// B operand of a tile whose rows are n and columns are k: two n-tiles of 8
DI void frag_bn(u32* f, u32 tile, int n0, int kk, int lane) {
  ldsm4(f, step(tile + swz<DIM>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1), kk) + n0 * DIM * 2);
}
// B operand of a tile whose rows are k and columns are n: n-tiles 2 np, 2 np + 1
DI void frag_bk(u32* f, u32 tile, int k0, int np, int lane) { ldsm4t(f, step(tile + swz<DIM>(lane & 15, lane >> 4), np) + k0 * DIM * 2); }

template <int N> DI void clear(float (*acc)[4]) {
#pragma unroll
  for (int n = 0; n < N; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
}
// s = this warp's rows, in registers, times the SIDE rows of a tile
template <int SIDE> DI void scores(float (*s)[4], u32 (*rows)[4], u32 tile, int lane) {
  clear<SIDE / 8>(s);
#pragma unroll
  for (int kk = 0; kk < STEPS; kk++)
#pragma unroll
    for (int np = 0; np < SIDE / 16; np++) {
      u32 bf[4];
      frag_bn(bf, tile, np * 16, kk, lane);
      mma16816(s[2 * np], rows[kk], bf[0], bf[1]); mma16816(s[2 * np + 1], rows[kk], bf[2], bf[3]);
    }
}
// the same, its rows r0 … in shared memory
template <int SIDE> DI void scores(float (*s)[4], u32 rows, int r0, u32 tile, int lane) {
  clear<SIDE / 8>(s);
#pragma unroll
  for (int kk = 0; kk < STEPS; kk++) {
    u32 af[4];
    frag_a(af, rows, r0, kk, lane);
#pragma unroll
    for (int np = 0; np < SIDE / 16; np++) {
      u32 bf[4];
      frag_bn(bf, tile, np * 16, kk, lane);
      mma16816(s[2 * np], af, bf[0], bf[1]); mma16816(s[2 * np + 1], af, bf[2], bf[3]);
    }
  }
}
// acc += p times a tile of SIDE rows
template <int SIDE> DI void weigh(float (*acc)[4], u32 (*p)[4], u32 tile, int lane) {
#pragma unroll
  for (int kk = 0; kk < SIDE / 16; kk++)
#pragma unroll
    for (int np = 0; np < DIM / 16; np++) {
      u32 bf[4];
      frag_bk(bf, tile, kk * 16, np, lane);
      mma16816(acc[2 * np], p[kk], bf[0], bf[1]); mma16816(acc[2 * np + 1], p[kk], bf[2], bf[3]);
    }
}

// s becomes e**(scale * (s - m)), m being the largest scores so far; what was summed up under smaller ones is scaled down
template <int SIDE> DI void softmax(float (*s)[4], float* m, float* l, float (*acc)[4], float sc) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float mx = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
    for (int n = 1; n < SIDE / 8; n++) mx = fmaxf(mx, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    mx = fmaxf(mx, shuffle_xor(mx, 1)); mx = fmaxf(mx, shuffle_xor(mx, 2));
    const float mn = fmaxf(m[r], mx), a = ex2((m[r] - mn) * sc), mb = mn * sc;
    m[r] = mn;
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++) {
      s[n][2 * r] = ex2(s[n][2 * r] * sc - mb); s[n][2 * r + 1] = ex2(s[n][2 * r + 1] * sc - mb);
      sum += s[n][2 * r] + s[n][2 * r + 1];
    }
    l[r] = l[r] * a + sum;
#pragma unroll
    for (int n = 0; n < TILES_N; n++) { acc[n][2 * r] *= a; acc[n][2 * r + 1] *= a; }
  }
}

DI void attn_fwd(const store_t* qkv, store_t* o, float* lse, const param_t* bias, int T, int H, float scale, u32 smem) {
  constexpr int SIDE = WAY_SIDE;
  constexpr u32 TILE = SIDE * DIM * 2;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, tiles = (T + 63) / 64;
  const Place at = place(tiles, H, CAUSAL);
  const int m0 = at.tile * 64, w0 = m0 + warp * 16, lo = H * DIM, ld = 3 * lo, count = ((CAUSAL ? min(m0 + 64, T) : T) + SIDE - 1) / SIDE;
  const float sc = scale * LOG2E;
  const store_t* Q = qkv + (u64)at.b * T * ld + at.h * DIM;
  const u32 sQ = smem, sK = sQ + OWN, sV = sK + 2 * TILE;
  auto load = [&](int j) {
    load_tile<SIDE>(sK + (j & 1) * TILE, Q + lo, j * SIDE, T, ld, tid);
    load_tile<SIDE>(sV + (j & 1) * TILE, Q + 2 * lo, j * SIDE, T, ld, tid);
    cp_commit();
  };
  load_tile<64>(sQ, Q, m0, T, ld, tid);
  load(0);
  u32 qf[STEPS][4];
  float acc[TILES_N][4], m[2] = {-INF, -INF}, l[2] = {0.f, 0.f};
  clear<TILES_N>(acc);
  for (int j = 0; j < count; j++) {
    cp_wait<0>();
    __syncthreads();
    if (j + 1 < count) load(j + 1);
    if (j == 0) {
#pragma unroll
      for (int kk = 0; kk < STEPS; kk++) frag_a(qf[kk], sQ, warp * 16, kk, lane);
    }
    if (CAUSAL && j * SIDE > w0 + 15) continue;  // all of this warp's rows lie before the tile
    float s[SIDE / 8][4];
    scores<SIDE>(s, qf, sK + (j & 1) * TILE, lane);
    const int end = (CAUSAL ? w0 + g + 1 : T) - j * SIDE - 2 * t;
    if (CAUSAL ? j * SIDE + SIDE - 1 > w0 : j * SIDE + SIDE > T) mask<SIDE / 8>(s, end);
    softmax<SIDE>(s, m, l, acc, sc);
    u32 p[SIDE / 16][4];
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++) operand(p, n, s[n][0], s[n][1], s[n][2], s[n][3]);
    weigh<SIDE>(acc, p, sV + (j & 1) * TILE, lane);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = l[r];
    sum += shuffle_xor(sum, 1); sum += shuffle_xor(sum, 2);
    const float inv = 1.f / sum;
#pragma unroll
    for (int n = 0; n < TILES_N; n++) { acc[n][2 * r] *= inv; acc[n][2 * r + 1] *= inv; }
    if (t == 0) lse[(u64)at.bh * tiles * 64 + w0 + g + 8 * r] = m[r] * sc + lg2(sum);
  }
  if (bias) add_columns<DIM>(acc, bias + 2 * lo + at.h * DIM, t);
  store_rows<DIM>(acc, sQ, warp * 16, o + (u64)at.b * T * lo + at.h * DIM, m0, T, lo, lane);
}

// dQ; also writes delta, which attn_dkv needs: launch this one first
DI void attn_dq(const store_t* qkv, const store_t* o, const store_t* dout, const param_t* bias, const float* lse, float* delta,
                const float2* turns, store_t* dqkv, float* parts, int T, int H, float scale, u32 smem) {
  constexpr int SIDE = BACK_SIDE;
  constexpr u32 TILE = SIDE * DIM * 2;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, tiles = (T + 63) / 64;
  const Place at = place(tiles, H, CAUSAL);
  const int m0 = at.tile * 64, w0 = m0 + warp * 16, lo = H * DIM, ld = 3 * lo, count = ((CAUSAL ? min(m0 + 64, T) : T) + SIDE - 1) / SIDE;
  const float sc = scale * LOG2E;
  const u64 rows = (u64)at.bh * tiles * 64, heads = (u64)at.b * T * lo + at.h * DIM, heads3 = (u64)at.b * T * ld + at.h * DIM;
  const store_t* Q = qkv + heads3;
  const u32 sQ = smem, sG = sQ + OWN, sK = sG + OWN, sV = sK + 2 * TILE;
  auto load = [&](int j) {
    load_tile<SIDE>(sK + (j & 1) * TILE, Q + lo, j * SIDE, T, ld, tid);
    load_tile<SIDE>(sV + (j & 1) * TILE, Q + 2 * lo, j * SIDE, T, ld, tid);
    cp_commit();
  };
  load_tile<64>(sQ, Q, m0, T, ld, tid);
  load_tile<64>(sG, dout + heads, m0, T, lo, tid);
  load(0);
  u32 qf[STEPS][4], gf[STEPS][4];
  float acc[TILES_N][4], L[2], D[2];
  clear<TILES_N>(acc);
  row_delta(o + heads, dout + heads, bias ? bias + 2 * lo + at.h * DIM : bias, delta + rows, w0, T, lo, lane, D);
  L[0] = lse[rows + w0 + g]; L[1] = lse[rows + w0 + g + 8];
  for (int j = 0; j < count; j++) {
    cp_wait<0>();
    __syncthreads();
    if (j + 1 < count) load(j + 1);
    if (j == 0) {
#pragma unroll
      for (int kk = 0; kk < STEPS; kk++) { frag_a(qf[kk], sQ, warp * 16, kk, lane); frag_a(gf[kk], sG, warp * 16, kk, lane); }
    }
    if (CAUSAL && j * SIDE > w0 + 15) continue;
    float s[SIDE / 8][4], dp[SIDE / 8][4];
    scores<SIDE>(s, qf, sK + (j & 1) * TILE, lane);
    const int end = (CAUSAL ? w0 + g + 1 : T) - j * SIDE - 2 * t;
    const bool edge = CAUSAL ? j * SIDE + SIDE - 1 > w0 : j * SIDE + SIDE > T;
    weights<SIDE / 8>(s, L, sc, edge, end);
    scores<SIDE>(dp, gf, sV + (j & 1) * TILE, lane);
    u32 p[SIDE / 16][4];
    gradients<SIDE / 8>(p, s, dp, D);
    weigh<SIDE>(acc, p, sK + (j & 1) * TILE, lane);
  }
  unrope<DIM>(acc, turns, w0 + g, scale, t);
  __syncthreads();  // nobody reads the tiles any more
  if (parts) col_part<DIM>(acc, sK, parts + ((u64)at.b * tiles + at.tile) * ld + at.h * DIM, warp, lane, tid);
  store_rows<DIM>(acc, sQ, warp * 16, dqkv + heads3, m0, T, ld, lane);
}

// p becomes p * (dp - delta) of transposed scores; `delta`, in shared memory, is that of this thread's first column
template <int TILES> DI void transposed_gradients(u32 (*p)[4], float (*dp)[4], u32 delta) {
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const float2 d = lds8(delta + n * 32), u = unpack2(p[n / 2][(n & 1) * 2]), v = unpack2(p[n / 2][(n & 1) * 2 + 1]);
    operand(p, n, u.x * (dp[n][0] - d.x), u.y * (dp[n][1] - d.y), v.x * (dp[n][2] - d.x), v.y * (dp[n][3] - d.y));
  }
}
// dK and dV of a block of keys: works on transposed scores, so that P and dS are A operands straight from registers
DI void attn_dkv(const store_t* qkv, const store_t* dout, const float* lse, const float* delta, const float2* turns, store_t* dqkv,
                 float* parts, int T, int H, float scale, u32 smem) {
  constexpr int SIDE = BACK_SIDE;
  constexpr u32 TILE = SIDE * DIM * 2;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, tiles = (T + 63) / 64;
  const Place at = place(tiles, H, false);
  const int n0 = at.tile * 64, w0 = n0 + warp * 16, lo = H * DIM, ld = 3 * lo;
  const int first = CAUSAL ? n0 / SIDE : 0, count = (T + SIDE - 1) / SIDE;
  const float sc = scale * LOG2E;
  const u64 rows = (u64)at.bh * tiles * 64, heads3 = (u64)at.b * T * ld + at.h * DIM;
  const store_t *Q = qkv + heads3, *G = dout + (u64)at.b * T * lo + at.h * DIM;
  const u32 sK = smem, sV = sK + OWN, sQ = sV + OWN, sG = sQ + 2 * TILE, sL = sG + 2 * TILE;  // sL: [2][lse, delta][SIDE]
  auto load = [&](int i) {
    load_tile<SIDE>(sQ + (i & 1) * TILE, Q, i * SIDE, T, ld, tid);
    load_tile<SIDE>(sG + (i & 1) * TILE, G, i * SIDE, T, lo, tid);
    if (tid < SIDE / 2) {
      const int c = tid % (SIDE / 4);
      cp16(sL + (i & 1) * SIDE * 8 + tid * 16, (tid < SIDE / 4 ? lse : delta) + rows + i * SIDE + 4 * c, true);
    }
    cp_commit();
  };
  load_tile<64>(sK, Q + lo, n0, T, ld, tid);
  load_tile<64>(sV, Q + 2 * lo, n0, T, ld, tid);
  load(first);
  float dk[TILES_N][4], dv[TILES_N][4];
  clear<TILES_N>(dk); clear<TILES_N>(dv);
  for (int i = first; i < count; i++) {
    cp_wait<0>();
    __syncthreads();
    const u32 q_ = sQ + (i & 1) * TILE, g_ = sG + (i & 1) * TILE, l_ = sL + (i & 1) * SIDE * 8 + 8 * t;
    if (i + 1 < count) load(i + 1);
    if (CAUSAL && i * SIDE + SIDE - 1 < w0) continue;  // every query of the tile lies before this warp's keys
    float s[SIDE / 8][4];
    u32 p[SIDE / 16][4];
    scores<SIDE>(s, sK, warp * 16, q_, lane);
    transposed_weights<SIDE / 8>(p, s, l_, sc, CAUSAL && i * SIDE < w0 + 15, w0 + g - i * SIDE - 2 * t);
    weigh<SIDE>(dv, p, g_, lane);
    scores<SIDE>(s, sV, warp * 16, g_, lane);
    transposed_gradients<SIDE / 8>(p, s, l_ + SIDE * 4);
    weigh<SIDE>(dk, p, q_, lane);
  }
  if (!CAUSAL) { clear_rows<DIM>(dk, w0 + g, T); clear_rows<DIM>(dv, w0 + g, T); }
  unrope<DIM>(dk, turns, w0 + g, scale, t);
  __syncthreads();
  if (parts) {
    float* pk = parts + ((u64)at.b * tiles + at.tile) * ld + lo + at.h * DIM;
    col_part<DIM>(dk, sQ, pk, warp, lane, tid);
    col_part<DIM>(dv, sG, pk + lo, warp, lane, tid);
  }
  store_rows<DIM>(dk, sK, warp * 16, dqkv + heads3 + lo, n0, T, ld, lane);
  store_rows<DIM>(dv, sV, warp * 16, dqkv + heads3 + 2 * lo, n0, T, ld, lane);
}
