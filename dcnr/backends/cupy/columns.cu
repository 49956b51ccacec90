// The last step of sums over rows: partial sums, a row per block of the kernel that made them, become up to three gradients. Fixed order.
#include "device.cuh"

// part[rows][columns]; columns are consecutive vectors of `width`: the k-th goes to into_k (nowhere if null), written or added.
// 32 columns a block; warp w sums rows w, w + 32, ..., then warp c adds the 32 sums of column c.
KERNEL __launch_bounds__(1024)
reduce_columns(const float* part, int rows, int columns, int width, float* into0, float* into1, float* into2, int accumulate) {
  __shared__ float sums[32][33];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * 32;
  float s = 0.f;
  if (first + lane < columns) {
    const float* p = part + first + lane;
    int r = warp;
    for (; r + 7 * 32 < rows; r += 8 * 32) {
      float v[8];
#pragma unroll
      for (int k = 0; k < 8; k++) v[k] = p[(u64)(r + 32 * k) * columns];
#pragma unroll
      for (int k = 0; k < 8; k++) s += v[k];
    }
#pragma unroll 4
    for (; r < rows; r += 32) s += p[(u64)r * columns];
  }
  sums[warp][lane] = s;
  __syncthreads();
  s = warp_sum(sums[lane][warp]);
  const int c = first + warp;
  if (lane != 0 || c >= columns) return;
  float* into = c < width ? into0 : c < 2 * width ? into1 : into2;
  if (!into) return;
  into += c % width;
  *into = accumulate ? *into + s : s;
} EXPORT(reduce_columns)
