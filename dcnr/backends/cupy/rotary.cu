// Rotary embedding of neighbouring pairs. A thread turns the pairs of one group at one position, in every batch row of its share.
// Angles are reduced in float64: at position 100,000 float32 would be off by 0.01.
#include "group.cuh"
constexpr int PAIRS = GROUP == 8 ? 4 : 1;

// x[batch][length][width]; grid (shares of length * width / (2 PAIRS) threads, shares of the batch); log_theta = log2(theta), sign -1: backward,
// first: the position of row 0
KERNEL __launch_bounds__(256) rotate(const store_t* x, store_t* y, int batch, int length, int width, double log_theta, float sign,
                                              int first) {
  const u64 plane = (u64)length * width, at = ((u64)blockIdx.x * 256 + threadIdx.x) * (2 * PAIRS);
  if (at >= plane) return;
  const int t = (int)(at / width), c = (int)(at % width);
  float cosine[PAIRS], sine[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; p++) {
    const double turns = (first + t) * exp2(-(double)(c + 2 * p) / width * log_theta) * 0.15915494309189533577;
    const float angle = (float)((turns - rint(turns)) * 6.28318530717958647693);
    cosine[p] = cosf(angle); sine[p] = sign * sinf(angle);
  }
  for (int b = blockIdx.y; b < batch; b += gridDim.y) {
    float f[2 * PAIRS];
    const store_t* from = x + b * plane + at;
    store_t* to = y + b * plane + at;
#if GROUP == 8
    load8(from, f);
#else
    f[0] = load1(from); f[1] = load1(from + 1);
#endif
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const float even = f[2 * p], odd = f[2 * p + 1];
      f[2 * p] = even * cosine[p] - odd * sine[p];
      f[2 * p + 1] = even * sine[p] + odd * cosine[p];
    }
#if GROUP == 8
    store8(to, f);
#else
    store1(to, f[0]); store1(to + 1, f[1]);
#endif
  }
} EXPORT(rotate)
