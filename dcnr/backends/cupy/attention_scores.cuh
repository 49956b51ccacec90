// Tiles of scores in the tensor-core kernels: masked, made probabilities, made operands of the next product. Layout: attention_epilogue.cuh.
// Where a tile lies at the edge, `end` is the first masked column of row g (with the causal mask 8 further on for row g + 8), `from` the
// first column of row g of transposed scores that is not masked (8 further on for row g + 8); both count from this thread's first column.
#pragma once
#include "attention_epilogue.cuh"
DI bool masked(int n, int e, int end) { return n * 8 + (e & 1) >= end + CAUSAL * 8 * (e >> 1); }

// tile n as half of an operand whose rows are the accumulator's
DI void operand(u32 (*p)[4], int n, float a, float b, float c, float d) {
  p[n / 2][(n & 1) * 2] = pack2(a, b); p[n / 2][(n & 1) * 2 + 1] = pack2(c, d);
}
template <int TILES> DI void mask(float (*s)[4], int end) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (masked(n, e, end)) s[n][e] = -INF;
}
// s becomes e**(scale * s - lse)
template <int TILES> DI void weights(float (*s)[4], const float* lse, float sc, bool edge, int end) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float x = ex2(s[n][e] * sc - lse[e >> 1]);
      if (edge && masked(n, e, end)) x = 0.f;
      s[n][e] = x;
    }
}
// ds = weights * (dp - delta)
template <int TILES> DI void gradients(u32 (*ds)[4], float (*s)[4], float (*dp)[4], const float* delta) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
    operand(ds, n, s[n][0] * (dp[n][0] - delta[0]), s[n][1] * (dp[n][1] - delta[0]), s[n][2] * (dp[n][2] - delta[1]),
            s[n][3] * (dp[n][3] - delta[1]));
}
// p = e**(scale * s - lse) of transposed scores; `lse`, in shared memory, is that of this thread's first column
template <int TILES> DI void transposed_weights(u32 (*p)[4], float (*s)[4], u32 lse, float sc, bool edge, int from) {
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const float2 l = lds8(lse + n * 32);
    float a = ex2(s[n][0] * sc - l.x), b = ex2(s[n][1] * sc - l.y), c = ex2(s[n][2] * sc - l.x), d = ex2(s[n][3] * sc - l.y);
    if (edge) {
      if (n * 8 < from) a = 0.f;
      if (n * 8 + 1 < from) b = 0.f;
      if (n * 8 < from + 8) c = 0.f;
      if (n * 8 + 1 < from + 8) d = 0.f;
    }
    operand(p, n, a, b, c, d);
  }
}
