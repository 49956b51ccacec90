// Attention without tensor cores: any storage, any head dim up to 256, any GPU. See attention.cuh for the arrays.
// Tiles of ROWS x ROWS scores, operands as float32 in shared memory. Thread (ty, tx) has the scores of rows ty + i ACROSS and columns
// tx + j ACROSS, and of an accumulator those rows and the chunks of four columns tx + c ACROSS; a row's threads are of one warp.
#include "attention.cuh"
constexpr int DIM = HEAD_DIM, WIDE = (DIM + 3) / 4 * 4, LD = WIDE % 8 ? WIDE : WIDE + 4;  // LD / 4 is odd: no bank conflicts
constexpr int ROWS = WIDE <= 64 ? 32 : WIDE <= 160 ? 16 : 8, ACROSS = ROWS < 16 ? ROWS : 16, THREADS = ACROSS * ACROSS, LDS = ROWS + 4;
constexpr int MT = ROWS / ACROSS, CHUNKS = (WIDE / 4 + ACROSS - 1) / ACROSS;
constexpr int SIZE = ROWS * LD, SIZE_S = ROWS * LDS;  // numbers in a tile of operands, of scores
typedef float Acc[MT][CHUNKS][4];

DI void load_rows(float* tile, const store_t* src, int row0, int T, int ld) {
#pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * WIDE; i += THREADS) {
    const int r = i / WIDE, c = i % WIDE;
    tile[r * LD + c] = row0 + r < T && c < DIM ? load1(src + (u64)(row0 + r) * ld + c) : 0.f;
  }
}
DI void clear(Acc& acc) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) acc[i][c][0] = acc[i][c][1] = acc[i][c][2] = acc[i][c][3] = 0.f;
}
// s = rows of a times rows of b
DI void scores(float (*s)[MT], const float* a, const float* b, int ty, int tx) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int j = 0; j < MT; j++) s[i][j] = 0.f;
#pragma unroll 2
  for (int d = 0; d < WIDE; d += 4) {
    float x[MT][4], y[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) { load4f(a + (ty + i * ACROSS) * LD + d, x[i]); load4f(b + (tx + i * ACROSS) * LD + d, y[i]); }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int j = 0; j < MT; j++) s[i][j] += x[i][0] * y[j][0] + x[i][1] * y[j][1] + x[i][2] * y[j][2] + x[i][3] * y[j][3];
  }
}
DI void put_scores(float* p, float (*s)[MT], int ty, int tx) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int j = 0; j < MT; j++) p[(ty + i * ACROSS) * LDS + tx + j * ACROSS] = s[i][j];
}
// acc += p [ROWS][LDS] times a tile
DI void weigh(Acc& acc, const float* p, const float* tile, int ty, int tx) {
#pragma unroll 2
  for (int j = 0; j < ROWS; j += 4) {
    float w[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) load4f(p + (ty + i * ACROSS) * LDS + j, w[i]);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int at = 4 * (tx + c * ACROSS);
      if (at >= WIDE) continue;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float v[4];
        load4f(tile + (j + k) * LD + at, v);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) acc[i][c][e] += w[i][k] * v[e];
      }
    }
  }
}
DI float row_sum(float v) {
#pragma unroll
  for (int m = 1; m < ACROSS; m *= 2) v += shuffle_xor(v, m);
  return v;
}
DI float row_max(float v) {
#pragma unroll
  for (int m = 1; m < ACROSS; m *= 2) v = fmaxf(v, shuffle_xor(v, m));
  return v;
}
// acc times `scale`, turned back, to rows of dst; its column sums to `part`. `tile` is free again for everybody.
DI void store_gradient(Acc& acc, float* tile, const float2* turns, float scale, store_t* dst, float* part, int row0, int T, int ld) {
  const int ty = threadIdx.x / ACROSS, tx = threadIdx.x % ACROSS;
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int r = ty + i * ACROSS, at = 4 * (tx + c * ACROSS);
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        float a = acc[i][c][e] * scale, b = acc[i][c][e + 1] * scale;
        if (turns && at + e < DIM) {
          const float2 w = turns[(row0 + r) * (DIM / 2) + (at + e) / 2];
          const float turned = a * w.x + b * w.y;
          b = b * w.x - a * w.y;
          a = turned;
        }
        if (at < WIDE) { tile[r * LD + at + e] = a; tile[r * LD + at + e + 1] = b; }
      }
    }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * DIM; i += THREADS) {
    const int r = i / DIM, c = i % DIM;
    if (row0 + r < T) store1(dst + (u64)(row0 + r) * ld + c, tile[r * LD + c]);
  }
  if (part)
    for (int c = threadIdx.x; c < DIM; c += THREADS) {
      float s = 0.f;
      for (int r = 0; r < ROWS; r++) s += tile[r * LD + c];
      part[c] = s;
    }
}

KERNEL __launch_bounds__(THREADS, 2)
attention(const store_t* qkv, store_t* o, float* lse, const param_t* bias, int T, int H, float scale) {
  __shared__ V4 memory[(3 * SIZE + SIZE_S) / 4];
  float *sQ = (float*)memory, *sK = sQ + SIZE, *sV = sK + SIZE, *sP = sV + SIZE;
  const int ty = threadIdx.x / ACROSS, tx = threadIdx.x % ACROSS, lo = H * DIM, ld = 3 * lo;
  const Place at = place((T + ROWS - 1) / ROWS, H, CAUSAL);
  const int m0 = at.tile * ROWS, last = CAUSAL ? at.tile : at.tiles - 1;
  const float sc = scale * LOG2E;
  const store_t* Q = qkv + (u64)at.b * T * ld + at.h * DIM;
  load_rows(sQ, Q, m0, T, ld);
  Acc acc;
  float m[MT], l[MT];
  clear(acc);
#pragma unroll
  for (int i = 0; i < MT; i++) { m[i] = -INF; l[i] = 0.f; }
  for (int n = 0; n <= last; n++) {
    __syncthreads();
    load_rows(sK, Q + lo, n * ROWS, T, ld);
    load_rows(sV, Q + 2 * lo, n * ROWS, T, ld);
    __syncthreads();
    float s[MT][MT];
    scores(s, sQ, sK, ty, tx);
#pragma unroll
    for (int i = 0; i < MT; i++) {
      float top = m[i], sum = 0.f;
#pragma unroll
      for (int j = 0; j < MT; j++) {
        const int key = n * ROWS + tx + j * ACROSS;
        if (CAUSAL ? key > m0 + ty + i * ACROSS : key >= T) s[i][j] = -INF;
        top = fmaxf(top, s[i][j]);
      }
      top = row_max(top);
      const float a = ex2((m[i] - top) * sc);
      m[i] = top;
#pragma unroll
      for (int j = 0; j < MT; j++) { s[i][j] = ex2((s[i][j] - top) * sc); sum += s[i][j]; }
      l[i] = l[i] * a + sum;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[i][c][e] *= a;
    }
    put_scores(sP, s, ty, tx);
    __syncwarp();
    weigh(acc, sP, sV, ty, tx);
  }
#pragma unroll
  for (int i = 0; i < MT; i++) {
    const int row = m0 + ty + i * ACROSS;
    const float sum = row_sum(l[i]), inv = 1.f / sum;
    if (row >= T) continue;
    if (tx == 0) lse[(u64)at.bh * ((T + 63) / 64 * 64) + row] = m[i] * sc + lg2(sum);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int column = at.h * DIM + 4 * (tx + c * ACROSS) + e;
        if (column < (at.h + 1) * DIM)
          store1(o + ((u64)at.b * T + row) * lo + column, acc[i][c][e] * inv + (bias ? bias_at(bias, 2 * lo + column) : 0.f));
      }
  }
}
EXPORT(attention)

// dQ; also writes delta, which attention_dkv needs: launch this one first
KERNEL __launch_bounds__(THREADS, 2)
attention_dq(const store_t* qkv, const store_t* o, const store_t* dout, const param_t* bias, const float* lse, float* delta,
    const float2* turns, store_t* dqkv, float* parts, int T, int H, float scale) {
  __shared__ V4 memory[(4 * SIZE + SIZE_S) / 4];
  float *sQ = (float*)memory, *sG = sQ + SIZE, *sK = sG + SIZE, *sV = sK + SIZE, *sP = sV + SIZE;
  const int ty = threadIdx.x / ACROSS, tx = threadIdx.x % ACROSS, lo = H * DIM, ld = 3 * lo;
  const Place at = place((T + ROWS - 1) / ROWS, H, CAUSAL);
  const int m0 = at.tile * ROWS, last = CAUSAL ? at.tile : at.tiles - 1;
  const float sc = scale * LOG2E;
  const u64 rows = (u64)at.bh * ((T + 63) / 64 * 64), heads = (u64)at.b * T * lo + at.h * DIM, heads3 = (u64)at.b * T * ld + at.h * DIM;
  const store_t* Q = qkv + heads3;
  load_rows(sQ, Q, m0, T, ld);
  load_rows(sG, dout + heads, m0, T, lo);
  Acc acc;
  float L[MT], D[MT];
  clear(acc);
#pragma unroll
  for (int i = 0; i < MT; i++) {
    const int row = m0 + ty + i * ACROSS;
    float d = 0.f;
    if (row < T)
      for (int c = tx; c < DIM; c += ACROSS) {
        const u64 e = heads + (u64)row * lo + c;
        d += (load1(o + e) - (bias ? bias_at(bias, 2 * lo + at.h * DIM + c) : 0.f)) * load1(dout + e);
      }
    D[i] = row_sum(d);
    L[i] = row < T ? lse[rows + row] : 0.f;
    if (tx == 0 && row < T) delta[rows + row] = D[i];
  }
  for (int n = 0; n <= last; n++) {
    __syncthreads();
    load_rows(sK, Q + lo, n * ROWS, T, ld);
    load_rows(sV, Q + 2 * lo, n * ROWS, T, ld);
    __syncthreads();
    float s[MT][MT], dp[MT][MT];
    scores(s, sQ, sK, ty, tx);
    scores(dp, sG, sV, ty, tx);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int j = 0; j < MT; j++) {
        const int row = m0 + ty + i * ACROSS, key = n * ROWS + tx + j * ACROSS;
        s[i][j] = row < T && (CAUSAL ? key <= row : key < T) ? ex2(s[i][j] * sc - L[i]) * (dp[i][j] - D[i]) : 0.f;
      }
    put_scores(sP, s, ty, tx);
    __syncwarp();
    weigh(acc, sP, sK, ty, tx);
  }
  __syncthreads();
  float* part = parts ? parts + ((u64)at.b * at.tiles + at.tile) * ld + at.h * DIM : parts;
  store_gradient(acc, sQ, turns, scale, dqkv + heads3, part, m0, T, ld);
}
EXPORT(attention_dq)

// dK and dV of a block of keys: rows of scores are keys, columns queries
KERNEL __launch_bounds__(THREADS, 2)
attention_dkv(const store_t* qkv, const store_t* dout, const float* lse, const float* delta, const float2* turns,
    store_t* dqkv, float* parts, int T, int H, float scale) {
  __shared__ V4 memory[(4 * SIZE + 2 * SIZE_S) / 4];
  float *sK = (float*)memory, *sV = sK + SIZE, *sQ = sV + SIZE, *sG = sQ + SIZE, *sP = sG + SIZE, *sS = sP + SIZE_S;
  const int ty = threadIdx.x / ACROSS, tx = threadIdx.x % ACROSS, lo = H * DIM, ld = 3 * lo;
  const Place at = place((T + ROWS - 1) / ROWS, H, false);
  const int n0 = at.tile * ROWS;
  const float sc = scale * LOG2E;
  const u64 rows = (u64)at.bh * ((T + 63) / 64 * 64), heads3 = (u64)at.b * T * ld + at.h * DIM;
  const store_t *Q = qkv + heads3, *G = dout + (u64)at.b * T * lo + at.h * DIM;
  load_rows(sK, Q + lo, n0, T, ld);
  load_rows(sV, Q + 2 * lo, n0, T, ld);
  Acc dk, dv;
  clear(dk); clear(dv);
  for (int n = CAUSAL ? at.tile : 0; n < at.tiles; n++) {
    __syncthreads();
    load_rows(sQ, Q, n * ROWS, T, ld);
    load_rows(sG, G, n * ROWS, T, lo);
    __syncthreads();
    float s[MT][MT], dp[MT][MT];
    scores(s, sK, sQ, ty, tx);
    scores(dp, sV, sG, ty, tx);
#pragma unroll
    for (int j = 0; j < MT; j++) {
      const int query = n * ROWS + tx + j * ACROSS;
      const float L = query < T ? lse[rows + query] : 0.f, D = query < T ? delta[rows + query] : 0.f;
#pragma unroll
      for (int i = 0; i < MT; i++) {
        const int key = n0 + ty + i * ACROSS;
        const float p = query < T && key < T && (!CAUSAL || key <= query) ? ex2(s[i][j] * sc - L) : 0.f;
        s[i][j] = p; dp[i][j] = p * (dp[i][j] - D);
      }
    }
    put_scores(sP, s, ty, tx);
    put_scores(sS, dp, ty, tx);
    __syncwarp();
    weigh(dv, sP, sG, ty, tx);
    weigh(dk, sS, sQ, ty, tx);
  }
  __syncthreads();
  float* part = parts ? parts + ((u64)at.b * at.tiles + at.tile) * ld + lo + at.h * DIM : parts;
  store_gradient(dk, sK, turns, scale, dqkv + heads3 + lo, part, n0, T, ld);
  store_gradient(dv, sV, nullptr, 1.f, dqkv + heads3 + 2 * lo, part ? part + lo : part, n0, T, ld);
}
EXPORT(attention_dkv)
