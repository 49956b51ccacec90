// A kernel for the tests of the emulator: it touches each kind of thing that kernels use.
#include "device.cuh"
extern __shared__ V4 dynamic[];
// y = x * scale, eight at a time
KERNEL __launch_bounds__(128) scale(const store_t* x, store_t* y, float by, int n) {
  const int i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  float f[8];
  if (i + 8 <= n) {
    load8(x + i, f);
    for (int j = 0; j < 8; j++) f[j] *= by;
    store8(y + i, f);
  } else {
    for (int j = i; j < n; j++) store1(y + j, load1(x + j) * by);
  }
}
EXPORT(scale)
// one sum of a row of n floats, through dynamic and static shared memory, by the block
KERNEL row_sum(const float* x, float* y, int n) {
  __shared__ float parts[32];
  float* row = (float*)dynamic;
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[(u64)blockIdx.x * n + i];
  __syncthreads();
  float s = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s += row[n - 1 - i];
  s = warp_sum(s);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    s = 0.f;
    for (int w = 0; w < blockDim.x / 32; w++) s += parts[w];
    y[blockIdx.x] = s;
  }
}
EXPORT(row_sum)
// faults, by number
KERNEL fault(float* y, int kind, int n) {
  if (kind == 0) y[n] = 1.f;                                          // behind the array
  if (kind == 1 || kind == 6) {                                       // half of the block at a barrier, half waits for bytes
    if (threadIdx.x == 0) mbar_init(0, 1);
    __syncthreads();
    if (kind == 6) mbar_arrive(0), mbar_arrive(0), mbar_init(0, 1), mbar_expect(0, 16), mbar_arrive(0);  // too often in one phase
    if (threadIdx.x < 32) __syncthreads(); else mbar_wait(0, 0);
  }
  if (kind == 2) stg16((char*)y + 4, V4());                           // unaligned
  if (kind == 3) sts4(4096, 0);                                       // outside of shared memory
  if (kind == 4) { float* s = (float*)dynamic; s[threadIdx.x] = 1.f; y[threadIdx.x] = s[(threadIdx.x + 1) % blockDim.x]; }  // a race
  if (kind == 7 && threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.f, 1);
  if (kind == 8) y[0] = (float)smem_addr(y);
  if (kind == 5) ((char*)dynamic)[n] = 1;                             // behind shared memory
}
EXPORT(fault)
// c [16, 8] = a [16, 16] b [8, 16]^T on tensor cores, through cp.async and ldmatrix
KERNEL tile(const store_t* a, const store_t* b, float* c) {
#if STORAGE != 3
  const int lane = threadIdx.x, row = lane >> 1, half = lane & 1;
  const u32 base = smem_addr(dynamic);
  cp16(base + row * 32 + half * 16, a + row * 16 + half * 8, true);
  cp16(base + 512 + row * 32 + half * 16, b + (row & 7) * 16 + half * 8, row < 8);
  cp_commit();
  cp_wait<0>();
  __syncthreads();
  u32 x[4], y[4];
  ldsm4(x, base + (lane & 15) * 32 + (lane >> 4) * 16);
  ldsm4(y, base + 512 + (lane & 7) * 32 + (lane >> 3 & 1) * 16);
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  mma16816(sums, x, y[0], y[1]);
  for (int e = 0; e < 4; e++) c[(lane / 4 + 8 * (e >> 1)) * 8 + 2 * (lane & 3) + (e & 1)] = sums[e];
#endif
}
EXPORT(tile)
