// Dropout and random masks: y = keep * x * scale (+ residual).
#include "group.cuh"

KERNEL __launch_bounds__(256) dropout(const store_t* x, const store_t* residual, Mask mask, store_t* y, u64 groups) {
  const u64 first = (u64)blockIdx.x * 512 + threadIdx.x;
  Raw branch[2], stream[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const u64 i = first + 256 * k;
    if (i < groups) {
      branch[k] = fetch_group(x + i * GROUP);
      if (residual) stream[k] = fetch_group(residual + i * GROUP);
    }
  }
  const u32 step = *mask.step;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const u64 i = first + 256 * k;
    if (i >= groups) continue;
    float f[GROUP], r[GROUP];
    unpack_group(branch[k], f);
    drop_group(mask, step, i * GROUP, f);
    if (residual) {
      unpack_group(stream[k], r);
#pragma unroll
      for (int e = 0; e < GROUP; e++) f[e] += r[e];
    }
    store_group(y + i * GROUP, f);
  }
} EXPORT(dropout)
