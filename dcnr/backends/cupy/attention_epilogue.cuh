// Epilogues of the tensor-core kernels: what happens to accumulators on their way out. 16-bit storage.
// An accumulator is that of mma.sync: of tile n a thread holds columns 8 n + 2 t, + 1 of row g in [n][0..1], of row g + 8 in [n][2..3].
#pragma once
#include "attention.cuh"
extern __shared__ __align__(1024) V4 shared_memory[];
#define SHARED smem_addr(shared_memory)

// byte offset of 16-byte chunk c of row r in a tile of COLS columns: chunks are permuted so that eight rows meet all banks once
template <int COLS> DI u32 swz(int r, int c) { return (u32)(r * COLS * 2 + ((c ^ (COLS % 64 ? (r >> 1) & 3 : r & 7)) << 4)); }

// a warp's 16 rows, rounded, through its own rows of a tile in shared memory: whole 16-byte chunks go out
template <int COLS> DI void store_rows(float (*acc)[4], u32 tile, int r0, store_t* dst, int row0, int T, int ld, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < COLS / 8; n++) {
    sts4(tile + swz<COLS>(r0 + g, n) + 4 * t, pack2(acc[n][0], acc[n][1]));
    sts4(tile + swz<COLS>(r0 + g + 8, n) + 4 * t, pack2(acc[n][2], acc[n][3]));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < COLS / 16; i++) {
    const int idx = lane + 32 * i, r = idx / (COLS / 8), c = idx % (COLS / 8);
    if (row0 + r0 + r < T) stg16(dst + (u64)(row0 + r0 + r) * ld + c * 8, lds16(tile + swz<COLS>(r0 + r, c)));
  }
}

// times scale, and turned back by the angle of its position; `turns` starts at this accumulator's first column
template <int COLS> DI void unrope(float (*acc)[4], const float2* turns, int row, float scale, int t) {
#pragma unroll
  for (int n = 0; n < COLS / 8; n++) {
    const float a0 = acc[n][0] * scale, a1 = acc[n][1] * scale, b0 = acc[n][2] * scale, b1 = acc[n][3] * scale;
    if (turns) {
      const float2 ca = turns[row * (HEAD_DIM / 2) + 4 * n + t], cb = turns[(row + 8) * (HEAD_DIM / 2) + 4 * n + t];
      acc[n][0] = a0 * ca.x + a1 * ca.y; acc[n][1] = a1 * ca.x - a0 * ca.y;
      acc[n][2] = b0 * cb.x + b1 * cb.y; acc[n][3] = b1 * cb.x - b0 * cb.y;
    } else {
      acc[n][0] = a0; acc[n][1] = a1; acc[n][2] = b0; acc[n][3] = b1;
    }
  }
}

// + bias, which starts at this accumulator's first column
template <int COLS> DI void add_columns(float (*acc)[4], const param_t* bias, int t) {
#pragma unroll
  for (int n = 0; n < COLS / 8; n++) {
    const float x = bias_at(bias, n * 8 + 2 * t), y = bias_at(bias, n * 8 + 2 * t + 1);
    acc[n][0] += x; acc[n][1] += y; acc[n][2] += x; acc[n][3] += y;
  }
}

// rows past the last key got what is no gradient (without the causal mask queries see them); here they get zero
template <int COLS> DI void clear_rows(float (*acc)[4], int row, int T) {
#pragma unroll
  for (int n = 0; n < COLS / 8; n++) {
    if (row >= T) acc[n][0] = acc[n][1] = 0.f;
    if (row + 8 >= T) acc[n][2] = acc[n][3] = 0.f;
  }
}

// column sums of the 64 rows of four warps, in warp order; scratch: 16 * COLS bytes that nobody reads any more
template <int COLS> DI void col_part(float (*acc)[4], u32 scratch, float* dst, int warp, int lane, int tid) {
#pragma unroll
  for (int n = 0; n < COLS / 8; n++) {
    float a = acc[n][0] + acc[n][2], b = acc[n][1] + acc[n][3];
    a += shuffle_xor(a, 4); b += shuffle_xor(b, 4);
    a += shuffle_xor(a, 8); b += shuffle_xor(b, 8);
    a += shuffle_xor(a, 16); b += shuffle_xor(b, 16);
    if (lane < 4) {
      const u32 at = scratch + (warp * COLS + n * 8 + 2 * lane) * 4;
      sts4(at, float_bits(a)); sts4(at + 4, float_bits(b));
    }
  }
  __syncthreads();
  if (tid < COLS) {
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++) s += lds4f(scratch + (w * COLS + tid) * 4);
    dst[tid] = s;
  }
}

DI float dot8(V4 x, V4 y, const float* bias) {  // (x - bias) . y
  const float2 x0 = unpack2(x.x), x1 = unpack2(x.y), x2 = unpack2(x.z), x3 = unpack2(x.w);
  const float2 y0 = unpack2(y.x), y1 = unpack2(y.y), y2 = unpack2(y.z), y3 = unpack2(y.w);
  float d = (x0.x - bias[0]) * y0.x + (x0.y - bias[1]) * y0.y;
  d += (x1.x - bias[2]) * y1.x + (x1.y - bias[3]) * y1.y;
  d += (x2.x - bias[4]) * y2.x + (x2.y - bias[5]) * y2.y;
  d += (x3.x - bias[6]) * y3.x + (x3.y - bias[7]) * y3.y;
  return d;
}
// delta of a warp's 16 rows from `row0` on, written, and D = those of rows g and g + 8. O, G, bias: at this head's first column.
DI void row_delta(const store_t* O, const store_t* G, const param_t* bias, float* delta, int row0, int T, int ld, int lane, float* D) {
  constexpr int CHUNKS = HEAD_DIM / 8, TURNS = (CHUNKS + 7) / 8;  // eight lanes a row, four rows a pass
  const int c = lane & 7, g = lane >> 2;
  float bb[TURNS][8], d4[4];
#pragma unroll
  for (int k = 0; k < TURNS; k++)
#pragma unroll
    for (int e = 0; e < 8; e++) bb[k][e] = bias && c + 8 * k < CHUNKS ? bias_at(bias, (c + 8 * k) * 8 + e) : 0.f;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int row = row0 + 4 * q + (lane >> 3);
    float d = 0.f;
#pragma unroll
    for (int k = 0; k < TURNS; k++)
      if (row < T && c + 8 * k < CHUNKS) {
        const u64 at = (u64)row * ld + (c + 8 * k) * 8;
        d += dot8(ldg16(O + at), ldg16(G + at), bb[k]);
      }
    d += shuffle_xor(d, 1); d += shuffle_xor(d, 2); d += shuffle_xor(d, 4);
    if (c == 0) delta[row] = d;
    d4[q] = d;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {  // row g + 8 r sits in pass (g + 8 r) / 4, lanes from 8 * (g % 4) on
    const float x0 = __shfl_sync(0xffffffffu, d4[2 * r], (g & 3) * 8), x1 = __shfl_sync(0xffffffffu, d4[2 * r + 1], (g & 3) * 8);
    D[r] = g < 4 ? x0 : x1;
  }
}
