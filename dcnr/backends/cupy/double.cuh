// Sums of float64 numbers over a block, in a fixed order.
#pragma once
#include "device.cuh"
DI double shuffle_xor(double v, int mask) {
  union { double whole; float half[2]; } bits;  // only moved, never rounded
  bits.whole = v;
  bits.half[0] = shuffle_xor(bits.half[0], mask);
  bits.half[1] = shuffle_xor(bits.half[1], mask);
  return bits.whole;
}
// over WARPS warps; every thread gets it. `shared` [WARPS] must not be in use.
template <int WARPS> DI double block_sum(double v, double* shared) {
  v += shuffle_xor(v, 16); v += shuffle_xor(v, 8); v += shuffle_xor(v, 4); v += shuffle_xor(v, 2); v += shuffle_xor(v, 1);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  double total = 0;
  for (int i = 0; i < WARPS; i++) total += shared[i];
  return total;
}
