// Casts, sums of arrays, sums over rows, causal masks. GROUP neighbours at a time (8 needs 16-byte boundaries); a tail goes one by one.
#ifndef GROUP
#define GROUP 1
#endif
#ifndef TERMS
#define TERMS 1
#endif
#include "group.cuh"

DI void load_floats(const float* p, float* f) {
#if GROUP == 8
  load8f(p, f);
#else
  f[0] = *p;
#endif
}
DI void store_floats(float* p, const float* f) {
#if GROUP == 8
  store8f(p, f);
#else
  *p = f[0];
#endif
}
DI u64 first_element() { return ((u64)blockIdx.x * 256 + threadIdx.x) * GROUP; }

KERNEL __launch_bounds__(256) widen(const store_t* x, float* y, u64 n) {
  u64 i = first_element();
  if (i + GROUP <= n) {
    float f[GROUP];
    load_group(x + i, f);
    store_floats(y + i, f);
  } else {
    for (; i < n; i++) y[i] = load1(x + i);
  }
} EXPORT(widen)

KERNEL __launch_bounds__(256) narrow(const float* x, store_t* y, u64 n) {
  u64 i = first_element();
  if (i + GROUP <= n) {
    float f[GROUP];
    load_floats(x + i, f);
    store_group(y + i, f);
  } else {
    for (; i < n; i++) store1(y + i, x[i]);
  }
} EXPORT(narrow)

KERNEL __launch_bounds__(256) from_integers(const long long* x, store_t* y, u64 n) {
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i < n) store1(y + i, (float)x[i]);
} EXPORT(from_integers)

KERNEL __launch_bounds__(256) add_into(float* into, const store_t* x, u64 n) {
  u64 i = first_element();
  if (i + GROUP <= n) {
    float f[GROUP], s[GROUP];
    load_group(x + i, f);
    load_floats(into + i, s);
#pragma unroll
    for (int e = 0; e < GROUP; e++) s[e] += f[e];
    store_floats(into + i, s);
  } else {
    for (; i < n; i++) into[i] += load1(x + i);
  }
} EXPORT(add_into)

// y = ((t0 + t1) + t2) + ..., rounded once
struct Terms { const store_t* at[TERMS]; };
KERNEL __launch_bounds__(256) add_terms(const Terms terms, store_t* y, u64 n) {
  u64 i = first_element();
  if (i + GROUP <= n) {
    Raw raw[TERMS];
#pragma unroll
    for (int t = 0; t < TERMS; t++) raw[t] = fetch_group(terms.at[t] + i);
    float sum[GROUP], f[GROUP];
    unpack_group(raw[0], sum);
#pragma unroll
    for (int t = 1; t < TERMS; t++) {
      unpack_group(raw[t], f);
#pragma unroll
      for (int e = 0; e < GROUP; e++) sum[e] += f[e];
    }
    store_group(y + i, sum);
  } else {
    for (; i < n; i++) {
      float sum = load1(terms.at[0] + i);
#pragma unroll
      for (int t = 1; t < TERMS; t++) sum += load1(terms.at[t] + i);
      store1(y + i, sum);
    }
  }
} EXPORT(add_terms)

// Partial sums of the columns of x[rows][columns]: part[blockIdx.y][columns] of `per_block` rows each; `columns` is a multiple of GROUP.
// A block has 32 groups of columns; its warp w sums rows w, w + 8, ... of its share, four loads in flight.
KERNEL __launch_bounds__(256) column_partials(const store_t* x, float* part, u64 rows, int columns, u64 per_block) {
  __shared__ float sums[8][32 * GROUP];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = (blockIdx.x * 32 + lane) * GROUP;
  const u64 first = blockIdx.y * per_block, last = first + per_block < rows ? first + per_block : rows;
  float s[GROUP], f[GROUP];
#pragma unroll
  for (int e = 0; e < GROUP; e++) s[e] = 0.f;
  if (column < columns) {
    const store_t* p = x + column;
    u64 r = first + warp;
    for (; r + 24 < last; r += 32) {
      Raw raw[4];
#pragma unroll
      for (int k = 0; k < 4; k++) raw[k] = fetch_group(p + (r + 8 * k) * columns);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        unpack_group(raw[k], f);
#pragma unroll
        for (int e = 0; e < GROUP; e++) s[e] += f[e];
      }
    }
    for (; r < last; r += 8) {
      load_group(p + r * columns, f);
#pragma unroll
      for (int e = 0; e < GROUP; e++) s[e] += f[e];
    }
  }
#pragma unroll
  for (int e = 0; e < GROUP; e++) sums[warp][lane * GROUP + e] = s[e];
  __syncthreads();
  const int c = blockIdx.x * 32 * GROUP + threadIdx.x;
  if (threadIdx.x >= 32 * GROUP || c >= columns) return;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < 8; w++) total += sums[w][threadIdx.x];
  part[(u64)blockIdx.y * columns + c] = total;
} EXPORT(column_partials)

// x[..., i, j] where j <= i, else `fill`: a block per row, of which `height` make one matrix; `width` is a multiple of GROUP
KERNEL __launch_bounds__(128) causal_mask(const store_t* x, store_t* y, int height, int width, float fill) {
  const u64 start = (u64)blockIdx.x * width;
  const int i = blockIdx.x % height;
  for (int j = threadIdx.x * GROUP; j < width; j += 128 * GROUP) {
    float f[GROUP];
    load_group(x + start + j, f);
#pragma unroll
    for (int e = 0; e < GROUP; e++) f[e] = j + e <= i ? f[e] : fill;
    store_group(y + start + j, f);
  }
} EXPORT(causal_mask)
