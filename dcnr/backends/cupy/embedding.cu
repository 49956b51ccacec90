// Rows of a table by id, and the gradient of the table without atomics: rows are sorted by id, and equal ids are summed in order.
// Rule 1: an id outside of the table cannot be refused here: it reads a row of NaN, and its gradient goes nowhere.
// Rule 2: the sort is a stable radix sort, DIGIT_BITS at a time, whose result does not depend on who runs first.
// Rule 3: a row of D columns goes in vectors of eight; with ALIGNED 0 (rows not at 16-byte boundaries) they are read one by one.
#include "device.cuh"
#ifndef TABLE
#define TABLE STORAGE      // what `w` holds, as STORAGE
#define POSITIONS STORAGE  // what `positions` holds
#endif
#ifndef ALIGNED
#define ALIGNED 1
#endif
#ifndef VECTORS
#define VECTORS (STORAGE == 3 ? 1 : 2)
#endif
typedef long long i64;

// --- forward -----------------------------------------------------------------------------------------------------------------------

// eight numbers at `at`, or `left` of them and zeros
template <int STORED> DI void read8(const void* p, u64 at, int left, float* f) {
#if ALIGNED
  load8_of<STORED>((const char*)p + at * (STORED == 3 ? 4 : 2), f);
#else
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] = e < left ? load1_of<STORED>(p, at + e) : 0.f;
#endif
}
DI void write8(store_t* p, int left, const float* f) {
#if ALIGNED
  store8(p, f);
#else
  for (int e = 0; e < left && e < 8; e++) store1(p + e, f[e]);
#endif
}

// y[r] = w[ids[r]] (+ positions[r % T]); `lanes` (a power of two, at most 32) threads a row
KERNEL __launch_bounds__(256) embedding(const i64* ids, const void* w, const void* positions, store_t* y, u64 R, u64 V, int T, int D, int lanes) {
  const u64 row = ((u64)blockIdx.x * 256 + threadIdx.x) / lanes;
  if (row >= R) return;
  const u64 id = ids[row], t = row % T;
  for (int c = threadIdx.x % lanes * 8; c < D; c += lanes * 8) {
    float f[8], p[8];
    if (id < V) {
      read8<TABLE>(w, id * D + c, D - c, f);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] = INF - INF;
    }
    if (positions) {
      read8<POSITIONS>(positions, t * D + c, D - c, p);
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] += p[e];
    }
    write8(y + row * D + c, D - c, f);
  }
}
EXPORT(embedding)

// --- sort --------------------------------------------------------------------------------------------------------------------------

#define DIGIT_BITS 8
#define DIGITS 256
// Block b has elements [b * span, (b + 1) * span), 256 at a time.

// keys = ids, or V for those outside of the table; rows = 0, 1, 2, …
KERNEL __launch_bounds__(256) sort_begin(const i64* ids, u32* keys, u32* rows, u32 V, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  keys[i] = (u64)ids[i] < V ? (u32)ids[i] : V;
  rows[i] = i;
}
EXPORT(sort_begin)

// counts[b][d]: how often block b has digit d
KERNEL __launch_bounds__(256) sort_count(const u32* keys, u32* counts, int shift, int span, int n) {
  __shared__ u32 found[DIGITS];
  const int begin = blockIdx.x * span, end = min(n, begin + span);
  found[threadIdx.x] = 0;
  __syncthreads();
  for (int i = begin + threadIdx.x; i < end; i += 256) atomicAdd(&found[keys[i] >> shift & (DIGITS - 1)], 1u);  // whole numbers: any order
  __syncthreads();
  counts[blockIdx.x * DIGITS + threadIdx.x] = found[threadIdx.x];
}
EXPORT(sort_count)

// the sum of `v` over the threads before this one
DI u32 sum_before(u32 v, u32* shared) {
  shared[threadIdx.x] = v;
  __syncthreads();
  for (int step = 1; step < 256; step *= 2) {
    const u32 other = threadIdx.x >= step ? shared[threadIdx.x - step] : 0;
    __syncthreads();
    shared[threadIdx.x] += other;
    __syncthreads();
  }
  return shared[threadIdx.x] - v;
}

// Moves every element behind all with a smaller digit and, in order, behind its equals.
KERNEL __launch_bounds__(256) sort_move(const u32* keys, const u32* rows, const u32* counts, u32* to_keys, u32* to_rows, int shift, int span, int n) {
  __shared__ u32 scan[DIGITS], next[DIGITS], digits[256], of_warp[8][DIGITS];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, begin = blockIdx.x * span, end = min(n, begin + span);
  u32 before = 0, all = 0;  // digit `tid` in the blocks before this one, and in all
#pragma unroll 8
  for (int b = 0; b < (int)gridDim.x; b++) {
    const u32 count = counts[b * DIGITS + tid];
    before += b < (int)blockIdx.x ? count : 0;
    all += count;
  }
  next[tid] = sum_before(all, scan) + before;  // where the next element with digit `tid` goes
  for (int first = begin; first < end; first += 256) {
    const int i = first + tid;
    const u32 key = i < end ? keys[i] : 0, digit = i < end ? key >> shift & (DIGITS - 1) : DIGITS;
    digits[tid] = digit;
#pragma unroll
    for (int w = 0; w < 8; w++) of_warp[w][tid] = 0;
    __syncthreads();
    u32 rank = 0, equal = 0;
#pragma unroll
    for (int l = 0; l < 32; l++) {
      const u32 same = digits[warp * 32 + l] == digit;
      equal += same;
      rank += l < lane ? same : 0;
    }
    if (rank == 0 && digit < DIGITS) of_warp[warp][digit] = equal;
    __syncthreads();
    u32 place = next[tid];  // thread `tid` now stands for digit `tid`
#pragma unroll
    for (int w = 0; w < 8; w++) { const u32 count = of_warp[w][tid]; of_warp[w][tid] = place; place += count; }
    next[tid] = place;
    __syncthreads();
    if (digit < DIGITS) {
      const u32 to = of_warp[warp][digit] + rank;
      to_keys[to] = key;
      to_rows[to] = rows[i];
    }
    __syncthreads();
  }
}
EXPORT(sort_move)

// --- sums over equal ids -----------------------------------------------------------------------------------------------------------

// eight neighbours as loaded, so that several loads are in flight
#if ALIGNED
typedef V8 Eight;
DI Eight get8(const store_t* p, u64 at, int left) { return fetch8(p + at); }
DI void widen(const Eight& v, float* f) { unpack8(v, f); }
#else
struct Eight { float f[8]; };
DI Eight get8(const store_t* p, u64 at, int left) { Eight v; read8<STORAGE>(p, at, left, v.f); return v; }
DI void widen(const Eight& v, float* f) {
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] = v.f[e];
}
#endif
DI void join8(float* into, int left, bool accumulate, const float* sum) {
#if ALIGNED
  float f[8] = {};
  if (accumulate) load8f(into, f);
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] += sum[e];
  store8f(into, f);
#else
  for (int e = 0; e < left && e < 8; e++) into[e] = accumulate ? into[e] + sum[e] : sum[e];
#endif
}

// A warp takes 32 sorted rows (a chunk) and 256 * VECTORS columns. A run of equal ids inside goes to the table at once. One that crosses
// the border goes to part[chunk][slot][D8]: slot 0 if it began before, slot 1 if it begins here and goes on.
KERNEL __launch_bounds__(256) sum_runs(const u32* keys, const u32* rows, const store_t* dy, float* into, float* part, u32 V, int n, int D, int D8,
                                      int accumulate) {
  const int lane = threadIdx.x & 31, chunk = blockIdx.x * 8 + (threadIdx.x >> 5), c0 = chunk * 32, c1 = min(c0 + 32, n);
  if (c0 >= n) return;
  const int column = blockIdx.y * 256 * VECTORS + lane * 8;
  const u32 mine = c0 + lane < c1 ? keys[c0 + lane] : V, row = c0 + lane < c1 ? rows[c0 + lane] : 0;
  const u32 before = c0 ? keys[c0 - 1] : ~0u, after = c1 < n ? keys[c1] : ~0u;
  float sum[VECTORS][8] = {};
  int start = c0;
  for (int j0 = c0; j0 < c1; j0 += 4) {
    Eight v[4][VECTORS];
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const u64 from = (u64)__shfl_sync(0xffffffffu, row, j0 - c0 + q) * D;
#pragma unroll
      for (int k = 0; k < VECTORS; k++) {
        const int c = column + 256 * k;
        if (j0 + q < c1 && c < D) v[q][k] = get8(dy, from + c, D - c);
      }
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const int j = j0 + q;
      const u32 id = __shfl_sync(0xffffffffu, mine, j - c0), following = __shfl_sync(0xffffffffu, mine, (j - c0 + 1) & 31);
      if (j >= c1) continue;
      const u32 next = j + 1 < c1 ? following : after;
      const bool ends = j + 1 == c1 || next != id;
      const bool head = start == c0 && before == id, tail = next == id;  // it began before this chunk; it goes on in the next
#pragma unroll
      for (int k = 0; k < VECTORS; k++) {
        const int c = column + 256 * k;
        if (c >= D) continue;
        float f[8];
        widen(v[q][k], f);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[k][e] += f[e];
        if (!ends) continue;
        if (head || tail) store8f(part + ((u64)chunk * 2 + !head) * D8 + c, sum[k]);
        else if (id < V) join8(into + (u64)id * D + c, D - c, accumulate, sum[k]);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[k][e] = 0.f;
      }
      if (ends) start = j + 1;
    }
  }
}
EXPORT(sum_runs)

// A block per chunk and 128 columns: where a run goes on beyond the chunk that it begins in, its parts are added up in order.
KERNEL __launch_bounds__(128) sum_parts(const u32* keys, float* into, const float* part, u32 V, int n, int D, int D8, int accumulate) {
  const int chunk = blockIdx.x, c1 = chunk * 32 + 32, c = blockIdx.y * 128 + threadIdx.x;
  if (c1 >= n || c >= D) return;
  const u32 id = keys[c1 - 1];
  if (keys[c1] != id || id >= V) return;
  if (chunk > 0 && keys[chunk * 32] == id && keys[chunk * 32 - 1] == id) return;  // it began before
  int low = c1, high = n;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (keys[middle] == id) low = middle + 1;
    else high = middle;
  }
  const int last = (low - 1) / 32;
  const float* p = part + c;
  float s = p[((u64)chunk * 2 + 1) * D8];
  int k = chunk + 1;
  for (; k + 15 <= last; k += 16) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = p[(u64)(k + i) * 2 * D8];
#pragma unroll
    for (int i = 0; i < 16; i++) s += v[i];
  }
  for (; k <= last; k++) s += p[(u64)k * 2 * D8];
  float* q = into + (u64)id * D + c;
  *q = accumulate ? *q + s : s;
}
EXPORT(sum_parts)

// --- sums per position -------------------------------------------------------------------------------------------------------------

// into[i] (+)= dy[0][i] + dy[1][i] + …, i < N = T * D; eight neighbours a thread
KERNEL __launch_bounds__(128) sum_positions(const store_t* dy, float* into, int accumulate, int B, u64 N) {
  const u64 i = ((u64)blockIdx.x * 128 + threadIdx.x) * 8;
  if (i >= N) return;
  const int left = (int)(N - i < 8 ? N - i : 8);
  float s[8] = {}, f[8];
  for (int b0 = 0; b0 < B; b0 += 8) {
    Eight v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) if (b0 + k < B) v[k] = get8(dy, (b0 + k) * N + i, left);
#pragma unroll
    for (int k = 0; k < 8; k++) if (b0 + k < B) {
      widen(v[k], f);
#pragma unroll
      for (int e = 0; e < 8; e++) s[e] += f[e];
    }
  }
  join8(into + i, left, accumulate, s);
}
EXPORT(sum_positions)
