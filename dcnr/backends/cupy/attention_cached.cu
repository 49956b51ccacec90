// Attention of new positions over keys and values that are kept: `Backend.attention_cached`. Any storage, any head dim up to 256, any GPU.
// `turn` of attention_rope has given q and k their bias and rotation; `keep` puts k and v beside those of earlier positions, and a block of
// `attend` takes one head of one new position: a warp has every eighth key, and the eight softmaxes are joined in order.
#include "attention.cuh"
constexpr int WARPS = 8, EACH = (HEAD_DIM + 31) / 32;

// qkv [B, T, 3, H, HEAD_DIM], into [B, S, 2, H, HEAD_DIM], count = B * T * E, E = 2 * H * HEAD_DIM
KERNEL __launch_bounds__(256) keep(const store_t* qkv, store_t* into, const param_t* bias, u64 count, int T, int E, int S, int first) {
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  const u64 row = i / E, b = row / T;
  const int c = (int)(i - row * E), half = E / 2, t = (int)(row - b * T);
  float f = load1(qkv + row * 3 * half + half + c);
  if (bias && c >= half) f += bias_at(bias, half + c);
  store1(into + (b * S + first + t) * E + c, f);
}
EXPORT(keep)

// grid B * T * H
KERNEL __launch_bounds__(256) attend(const store_t* qkv, const store_t* kept, store_t* o, int T, int H, int S, int first, float scale) {
  __shared__ float tops[WARPS], sums[WARPS], parts[WARPS][HEAD_DIM];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x / H, h = blockIdx.x % H;
  const int b = row / T, seen = first + row % T + 1, ld = 2 * H * HEAD_DIM;
  const store_t* q = qkv + ((u64)row * 3 * H + h) * HEAD_DIM;
  const store_t* keys = kept + (u64)b * S * ld + h * HEAD_DIM;
  float x[EACH], acc[EACH], top = -INF, sum = 0.f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int d = lane + 32 * e;
    x[e] = d < HEAD_DIM ? load1(q + d) * scale * LOG2E : 0.f;
    acc[e] = 0.f;
  }
  for (int j = warp; j < seen; j += WARPS) {
    const store_t *k = keys + (u64)j * ld, *v = k + H * HEAD_DIM;
    float s = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (lane + 32 * e < HEAD_DIM) s += x[e] * load1(k + lane + 32 * e);
    s = warp_sum(s);
    const float now = fmaxf(top, s), before = ex2(top - now), w = ex2(s - now);
    top = now;
    sum = sum * before + w;
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (lane + 32 * e < HEAD_DIM) acc[e] = acc[e] * before + w * load1(v + lane + 32 * e);
  }
  if (lane == 0) { tops[warp] = top; sums[warp] = sum; }
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (lane + 32 * e < HEAD_DIM) parts[warp][lane + 32 * e] = acc[e];
  __syncthreads();
  for (int d = threadIdx.x; d < HEAD_DIM; d += 256) {
    float highest = tops[0], total = 0.f, f = 0.f;
#pragma unroll
    for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, tops[w]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float share = ex2(tops[w] - highest);
      total += sums[w] * share;
      f += parts[w][d] * share;
    }
    store1(o + ((u64)row * H + h) * HEAD_DIM + d, f / total);
  }
}
EXPORT(attend)
