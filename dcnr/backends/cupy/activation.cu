// Activations with the bias of the product before them, and backward with the bias gradient: its column sums, made in the same pass.
// KIND: 0 relu, 1 gelu, 2 silu, 3 swiglu, whose rows are [value | gate] and whose result is value * silu(gate).
// A thread keeps GROUP columns and walks down rows, so its bias and its sums stay in registers (or L1). A block has `lanes` threads
// side by side and blockDim.x / lanes rows at a time; blockIdx.y counts tiles of columns. `columns` are those of the result.
#include "group.cuh"
#include "gelu.cuh"
constexpr bool GATED = KIND == 3;
constexpr int HALVES = GATED ? 2 : 1;

struct Place {
  int column, row, rows;  // the thread's first column, its row in the block, rows a block takes at a time
  __device__ __forceinline__ explicit Place(int lanes) {
    const int lane = (int)threadIdx.x % lanes;
    row = (int)threadIdx.x / lanes; rows = (int)blockDim.x / lanes;
    column = ((int)blockIdx.y * lanes + lane) * GROUP;
  }
};
DI float sigmoid(float x) { return rcp(1.f + ex2(-1.4426950408889634f * x)); }
DI float silu_slope(float x, float s) { return s * (1.f + x * (1.f - s)); }
DI float activated(float x) {
  if constexpr (KIND == 0) return x < 0.f ? 0.f : x;  // not fmaxf: NaN stays
  else if constexpr (KIND == 1) return gelu(x);
  else return x * sigmoid(x);
}
DI float slope(float x) {
  if constexpr (KIND == 1) return gelu_slope(x);
  else return silu_slope(x, sigmoid(x));
}

#ifndef SUMS
KERNEL __launch_bounds__(256, STORAGE == 3 ? 3 : GATED ? 4 : 5)
activate(const store_t* x, const param_t* bias, store_t* y, int rows, int columns, int lanes) {
  constexpr int ROWS = GATED ? 2 : 4;  // in flight
  const Place at(lanes);
  if (at.column >= columns) return;
  float b[HALVES][GROUP];
#pragma unroll
  for (int h = 0; h < HALVES; h++) load_optional(bias, (u64)h * columns + at.column, b[h]);
  const int hop = at.rows * ROWS;
  for (int first = blockIdx.x * hop + at.row; first < rows; first += gridDim.x * hop) {
    Raw raw[ROWS][HALVES];
#pragma unroll
    for (int k = 0; k < ROWS; k++)
      if (first + k * at.rows < rows) {
        const store_t* from = x + (u64)(first + k * at.rows) * (HALVES * columns) + at.column;
#pragma unroll
        for (int h = 0; h < HALVES; h++) raw[k][h] = fetch_group(from + h * columns);
      }
#pragma unroll
    for (int k = 0; k < ROWS; k++)
      if (first + k * at.rows < rows) {
        float f[HALVES][GROUP];
#pragma unroll
        for (int h = 0; h < HALVES; h++) unpack_group(raw[k][h], f[h]);
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
          const float v = f[0][e] + b[0][e];
          if constexpr (GATED) { const float g = f[1][e] + b[1][e]; f[0][e] = v * g * sigmoid(g); }
          else f[0][e] = activated(v);
        }
        store_group(y + (u64)(first + k * at.rows) * columns + at.column, f[0]);
      }
  }
} EXPORT(activate)

#else
// dx of a group and, where SUMS, its part of the column sums
DI void slope_group(const float* dy, float (*x)[GROUP], float (*sums)[GROUP]) {
#pragma unroll
  for (int e = 0; e < GROUP; e++) {
    if constexpr (GATED) {
      const float s = sigmoid(x[1][e]), w = dy[e] * x[0][e];
      x[0][e] = dy[e] * x[1][e] * s;
      x[1][e] = w * silu_slope(x[1][e], s);
    } else if constexpr (KIND == 0) x[0][e] = x[0][e] > 0.f ? dy[e] : 0.f;
    else x[0][e] = dy[e] * slope(x[0][e]);
    if constexpr (SUMS) {
#pragma unroll
      for (int h = 0; h < HALVES; h++) sums[h][e] += x[h][e];
    }
  }
}
// part[block][HALVES * columns]: sums over the block's rows. RESIDENT: blocks an SM.
KERNEL __launch_bounds__(256, RESIDENT)
activate_backward(const store_t* dy, const store_t* x, const param_t* bias, store_t* dx, float* part, int rows, int columns, int lanes) {
  const Place at(lanes);
  const bool inside = at.column < columns;
  const u64 pitch = (u64)HALVES * columns;
  float sums[HALVES][GROUP];
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int e = 0; e < GROUP; e++) sums[h][e] = 0.f;
  for (int r = inside ? blockIdx.x * at.rows + at.row : rows; r < rows; r += gridDim.x * at.rows) {
    Raw raw[HALVES];
    const Raw up = fetch_group(dy + (u64)r * columns + at.column);
#pragma unroll
    for (int h = 0; h < HALVES; h++) raw[h] = fetch_group(x + r * pitch + (u64)h * columns + at.column);
    float d[GROUP], f[HALVES][GROUP];
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      float b[GROUP];
      load_optional(bias, (u64)h * columns + at.column, b);  // from L1: cheaper than the registers
      unpack_group(raw[h], f[h]);
#pragma unroll
      for (int e = 0; e < GROUP; e++) f[h][e] += b[e];
    }
    unpack_group(up, d);
    slope_group(d, f, sums);
#pragma unroll
    for (int h = 0; h < HALVES; h++) store_group(dx + r * pitch + (u64)h * columns + at.column, f[h]);
  }
  if constexpr (!SUMS) return;
  __shared__ float shared[256 * GROUP];
  const int lane = (int)threadIdx.x % lanes;
  for (int h = 0; h < HALVES; h++) {  // the rows of the block, in order
#pragma unroll
    for (int e = 0; e < GROUP; e++) shared[(at.row * lanes + lane) * GROUP + e] = sums[h][e];
    __syncthreads();
    for (int c = threadIdx.x; c < lanes * GROUP; c += blockDim.x) {
      float s = shared[c];
      for (int k = 1; k < at.rows; k++) s += shared[k * lanes * GROUP + c];
      const int column = blockIdx.y * lanes * GROUP + c;
      if (column < columns) part[blockIdx.x * pitch + (u64)h * columns + column] = s;
    }
    __syncthreads();
  }
} EXPORT(activate_backward)
#endif
