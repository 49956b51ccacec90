// Layer normalisation of rows of WIDTH numbers, alone or of a residual sum, forward and backward. A team of lanes keeps a row in
// registers: one read, one write. Up to 1,024 numbers (512 backward) a team is a warp, beyond that a block, of as many lanes as it takes.
// Backward, a block walks over many rows, with the loads of the next one in flight, and leaves one partial sum per column:
// part[block][SUMS][WIDTH] for gain, bias and (SUMS 3) the bias of the branch that joined the residual.
#include "group.cuh"

DI constexpr int team_of(int numbers) {  // lanes for a row, if each holds so many numbers
  int team = 32;
  while (team < 1024 && team * numbers < WIDTH) team *= 2;
  return team;
}
#ifndef SUMS
constexpr int FORWARD = team_of(32), FORWARD_BLOCK = FORWARD > 32 ? FORWARD : 256;
constexpr int FORWARD_RESIDENT = STORAGE == 3 ? 1 : 0;  // blocks an SM at least; 0 leaves it to the compiler, which would spill float32
#else
constexpr int BACKWARD = team_of(16), BACKWARD_BLOCK = BACKWARD > 32 ? BACKWARD : 128;
#endif

template <int TEAM> struct Row {
  static constexpr int N = (WIDTH + TEAM * GROUP - 1) / (TEAM * GROUP);  // groups a lane
  int lane;
  __device__ __forceinline__ Row() : lane((int)threadIdx.x % TEAM) {}
  __device__ __forceinline__ int column(int i) const { return (lane + TEAM * i) * GROUP; }
  __device__ __forceinline__ bool has(int i) const { return WIDTH == N * TEAM * GROUP || column(i) < WIDTH; }
  __device__ __forceinline__ float mean(float v) const {  // over the row, of what the lanes have summed
    v = warp_sum(v);
    if constexpr (TEAM > 32) {
      __shared__ float warps[TEAM / 32];
      if (lane % 32 == 0) warps[lane / 32] = v;
      __syncthreads();
      v = 0.f;
#pragma unroll
      for (int w = 0; w < TEAM / 32; w++) v += warps[w];
      __syncthreads();
    }
    return v * (1.f / WIDTH);
  }
};

// y = (x - mean) * rstd * g + b
template <int TEAM>
DI void normalise(const Row<TEAM>& row, float (*x)[GROUP], const param_t* g, const param_t* b, float eps, store_t* y, float* mean, float* rstd) {
  constexpr int N = Row<TEAM>::N;
  float s = 0.f, q = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (row.has(i)) {
#pragma unroll
      for (int e = 0; e < GROUP; e++) s += x[i][e];
    }
  const float mu = row.mean(s);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (row.has(i)) {
#pragma unroll
      for (int e = 0; e < GROUP; e++) { const float d = x[i][e] - mu; q += d * d; }
    }
  const float rs = rsq(row.mean(q) + eps);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (row.has(i)) {
      float gain[GROUP], bias[GROUP];
      load_parameters(g + row.column(i), gain);
      load_optional(b, row.column(i), bias);
#pragma unroll
      for (int e = 0; e < GROUP; e++) bias[e] += (x[i][e] - mu) * rs * gain[e];
      store_group(y + row.column(i), bias);
    }
  if (row.lane == 0) { *mean = mu; *rstd = rs; }
}

#if !defined DROPOUT
KERNEL __launch_bounds__(FORWARD_BLOCK, FORWARD_RESIDENT)
layernorm(const store_t* x, const param_t* g, const param_t* b, float eps, store_t* y, float* mean, float* rstd, int rows) {
  const Row<FORWARD> row;
  const u64 r = (u64)blockIdx.x * (FORWARD_BLOCK / FORWARD) + threadIdx.x / FORWARD;
  if (r >= (u64)rows) return;
  float f[row.N][GROUP];
#pragma unroll
  for (int i = 0; i < row.N; i++)
    if (row.has(i)) load_group(x + r * WIDTH + row.column(i), f[i]);
  normalise(row, f, g, b, eps, y + r * WIDTH, mean + r, rstd + r);
} EXPORT(layernorm)

#elif !defined SUMS
// sum = residual + dropout(x + bias); y = layernorm(sum)
KERNEL __launch_bounds__(FORWARD_BLOCK, FORWARD_RESIDENT)
residual_norm(const store_t* x, const param_t* bias, const store_t* residual, Mask mask, const param_t* g, const param_t* b, float eps, store_t* sum,
              store_t* y, float* mean, float* rstd, int rows) {
  const Row<FORWARD> row;
  const u64 r = (u64)blockIdx.x * (FORWARD_BLOCK / FORWARD) + threadIdx.x / FORWARD;
  if (r >= (u64)rows) return;
  float f[row.N][GROUP];
  Raw branch[row.N], stream[row.N];
#pragma unroll
  for (int i = 0; i < row.N; i++)
    if (row.has(i)) { branch[i] = fetch_group(x + r * WIDTH + row.column(i)); stream[i] = fetch_group(residual + r * WIDTH + row.column(i)); }
  const u32 step = DROPOUT ? *mask.step : 0u;
#pragma unroll
  for (int i = 0; i < row.N; i++)
    if (row.has(i)) {
      const u64 at = r * WIDTH + row.column(i);
      float a[GROUP], c[GROUP];
      unpack_group(branch[i], a); unpack_group(stream[i], f[i]);
      load_optional(bias, row.column(i), c);
#pragma unroll
      for (int e = 0; e < GROUP; e++) a[e] += c[e];
      if (DROPOUT) drop_group(mask, step, at, a);
#pragma unroll
      for (int e = 0; e < GROUP; e++) f[i][e] += a[e];
      store_rounded(sum + at, f[i]);  // the norm sees what its backward will read
    }
  normalise(row, f, g, b, eps, y + r * WIDTH, mean + r, rstd + r);
} EXPORT(residual_norm)

#else
constexpr int TEAMS = BACKWARD_BLOCK / BACKWARD, GROUPS = Row<BACKWARD>::N;
typedef float Numbers[GROUPS][GROUP];

struct Next {  // the row that is being loaded
  Raw dy[GROUPS], x[GROUPS], dsum[GROUPS];
  float mean, rstd;
  __device__ __forceinline__ void fetch(const Row<BACKWARD>& row, int r, const store_t* dys, const store_t* xs, const store_t* dsums,
                                        const float* means, const float* rstds) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      if (row.has(i)) {
        const u64 at = (u64)r * WIDTH + row.column(i);
        dy[i] = fetch_group(dys + at); x[i] = fetch_group(xs + at);
        if (DSUM) dsum[i] = fetch_group(dsums + at);
      }
    mean = means[r]; rstd = rstds[r];
  }
};

// out[SUMS][WIDTH]: the sums of the teams of a block, in order
DI void add_teams(const Row<BACKWARD>& row, const Numbers* sums, float* out) {
  __shared__ float shared[TEAMS > 1 ? SUMS * WIDTH : 1];
  for (int t = 0; t < TEAMS; t++) {
    if (t == (int)threadIdx.x / BACKWARD) {
#pragma unroll
      for (int k = 0; k < SUMS; k++)
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
          if (row.has(i)) {
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
              const int c = k * WIDTH + row.column(i) + e;
              const float v = t ? shared[c] + sums[k][i][e] : sums[k][i][e];
              if (t == TEAMS - 1) out[c] = v; else shared[c] = v;
            }
          }
    }
    __syncthreads();
  }
}

// dresidual = dsum + layernorm'(dy), dx = dropout'(dresidual), which is dresidual itself without DROPOUT
KERNEL __launch_bounds__(BACKWARD_BLOCK, BACKWARD_BLOCK > 256 ? 1 : (STORAGE == 3 || GROUP == 1 ? 256 : 384) / BACKWARD_BLOCK)
norm_backward(const store_t* dy, const store_t* x, const float* mean, const float* rstd, const param_t* g, const store_t* dsum, Mask mask,
              store_t* dresidual, store_t* dx, float* part, int rows) {
  const Row<BACKWARD> row;
  const u32 step = DROPOUT ? *mask.step : 0u;
  Numbers sums[SUMS] = {};
  Next next;
  const int first = blockIdx.x * TEAMS + threadIdx.x / BACKWARD, hop = gridDim.x * TEAMS;
  if (first < rows) next.fetch(row, first, dy, x, dsum, mean, rstd);
  for (int r = first; r < rows; r += hop) {
    Numbers n, d;
    Raw stream[GROUPS];
    float c1 = 0.f, c2 = 0.f;
    const float mu = next.mean, rs = next.rstd;
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      if (row.has(i)) {
        float gain[GROUP];
        load_parameters(g + row.column(i), gain);  // from L1: cheaper than the registers
        unpack_group(next.dy[i], d[i]); unpack_group(next.x[i], n[i]);
        if (DSUM) stream[i] = next.dsum[i];
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
          n[i][e] = (n[i][e] - mu) * rs;
          sums[0][i][e] += d[i][e] * n[i][e]; sums[1][i][e] += d[i][e];
          d[i][e] *= gain[e];
          c1 += d[i][e]; c2 += d[i][e] * n[i][e];
        }
      }
    if (r + hop < rows) next.fetch(row, r + hop, dy, x, dsum, mean, rstd);
    c1 = row.mean(c1); c2 = row.mean(c2);
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      if (row.has(i)) {
        const u64 at = (u64)r * WIDTH + row.column(i);
        float v[GROUP];
        if (DSUM) unpack_group(stream[i], v);
#pragma unroll
        for (int e = 0; e < GROUP; e++) { const float t = rs * (d[i][e] - c1 - n[i][e] * c2); v[e] = DSUM ? v[e] + t : t; }
        store_group(dresidual + at, v);
        if (DROPOUT) { drop_group(mask, step, at, v); store_group(dx + at, v); }
#pragma unroll
        for (int e = 0; e < GROUP; e++) if (SUMS == 3) sums[SUMS - 1][i][e] += v[e];
      }
  }
  add_teams(row, sums, part + (u64)blockIdx.x * SUMS * WIDTH);
} EXPORT(norm_backward)
#endif
