// Costs: the loss of every row and its gradient in one pass, and the sum of the losses.
// Rule 1: a row with a negative target counts nothing: loss and gradient are zero, whatever the row holds.
// Rule 2: a target beyond the vocabulary is an error that a kernel cannot raise: loss and gradient become NaN, which ends in a skipped step.
// Rule 3: `d` may be `x`: a thread reads what it overwrites, and only that, and all read x[target] before anyone writes.
// Rule 4: `d` may be null: nobody wants the gradient.
// A row is held in registers by THREADS threads (`*_held`: 16-byte accesses only), or read twice by GROUP threads (any size, any alignment).
#include "double.cuh"
#ifndef THREADS
#define THREADS 128
#define VECTORS 2
#define BLOCKS 10
#endif
#ifndef GROUP
#define GROUP 256
#endif
#define LOG2E 1.4426950408889634f
typedef long long i64;

DI float power(float x, float top) { return ex2((x - top) * LOG2E); }  // e**(x - top)
DI float not_a_number() { return INF - INF; }
// The largest element of a row so far, and the sum of e**(x - top). Nothing but -inf: top is -inf, and terms are taken as they are.
struct Softmax { float top, sum; };
DI float base_of(float top) { return top == -INF ? 0.f : top; }

// over a warp, or a block of WARPS warps; every thread gets it
template <int WARPS> DI Softmax joined(Softmax own) {
  Softmax all;
  all.top = warp_max(own.top);
  all.sum = warp_sum(own.top == -INF ? own.sum : own.sum * power(own.top, all.top));
  if (WARPS == 1) return all;
  __shared__ float tops[32], sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (lane == 0) { tops[warp] = all.top; sums[warp] = all.sum; }
  __syncthreads();
  own.top = lane < WARPS ? tops[lane] : -INF;
  own.sum = lane < WARPS ? sums[lane] : 0.f;
  all.top = warp_max(own.top);
  all.sum = warp_sum(own.top == -INF ? own.sum : own.sum * power(own.top, all.top));
  return all;
}
template <int WARPS> DI float joined_sum(float v) {
  v = warp_sum(v);
  if (WARPS == 1) return v;
  __shared__ float sums[32];
  const int lane = threadIdx.x & 31;
  if (lane == 0) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_sum(lane < WARPS ? sums[lane] : 0.f);
}

// d = (e**(x - top) / sum - 1 at the target) * whole at eight neighbours; `factor` is whole / sum
DI void softmax_gradient(float* f, const Softmax& all, float factor, i64 target) {
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] = power(f[e], all.top);
  if ((u64)target < 8) {
#pragma unroll
    for (int e = 0; e < 8; e++) if (e == target) f[e] -= all.sum;
  }
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] *= factor;
}

KERNEL __launch_bounds__(THREADS, BLOCKS) cross_entropy_held(const store_t* x, store_t* d, const i64* targets, const float* bias, float* losses,
                                                            const float* weight, const float* grad_scale, int V) {
  const int tid = threadIdx.x, vectors = V / 8;
  const u64 row = (u64)blockIdx.x * V;
  V8 v[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) if (tid + i * THREADS < vectors) v[i] = fetch8(x + row + (tid + i * THREADS) * 8);
  const i64 target = targets[blockIdx.x];
  const bool counted = target >= 0, known = counted && target < V;
  const float whole = known ? *weight * *grad_scale : not_a_number();
  float own = known ? load1(x + row + target) : not_a_number();
  if (bias) {  // rounded as a product with a bias would round
    if (known) own = round_store(own + bias[target]);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) if (tid + i * THREADS < vectors) {
      float f[8], b[8]; unpack8(v[i], f); load8f(bias + (tid + i * THREADS) * 8, b);
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] += b[e];
      v[i] = pack8(f);
    }
  }
  Softmax mine; mine.top = -INF; mine.sum = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) if (tid + i * THREADS < vectors) {
    float f[8]; unpack8(v[i], f);
#pragma unroll
    for (int e = 0; e < 8; e++) mine.top = fmaxf(mine.top, f[e]);
  }
  const float base = base_of(mine.top);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) if (tid + i * THREADS < vectors) {
    float f[8]; unpack8(v[i], f);
#pragma unroll
    for (int e = 0; e < 8; e++) mine.sum += power(f[e], base);
  }
  const Softmax all = joined<THREADS / 32>(mine);
  if (tid == 0) losses[blockIdx.x] = counted ? logf(all.sum) + (all.top - own) : 0.f;
  if (!d) return;
  const float factor = whole * rcp(all.sum);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) if (tid + i * THREADS < vectors) {
    const int c = (tid + i * THREADS) * 8;
    float f[8] = {};
    if (counted) { unpack8(v[i], f); softmax_gradient(f, all, factor, target - c); }
    store8(d + row + c, f);
  }
}
EXPORT(cross_entropy_held)

// Calls vector(c) for eight neighbours from column c on, where x + c is at a 16-byte boundary, and single(c) for the columns between.
template <class Vector, class Single> DI void along(const store_t* x, bool alike, int V, int lane, Vector vector, Single single) {
  const int size = sizeof(store_t), head = alike ? min(V, (int)((16 - (u64)x % 16) % 16) / size) : V, end = head + (V - head) / 8 * 8;
  for (int c = lane; c < head; c += GROUP) single(c);
  for (int c = head + lane * 8; c < end; c += GROUP * 8) vector(c);
  for (int c = end + lane; c < V; c += GROUP) single(c);
}
DI bool alike(const store_t* x, const store_t* y) { return ((u64)x - (u64)y) % 16 == 0; }

DI void observe(Softmax& s, float x) {
  if (x > s.top) { s.sum *= power(s.top, x); s.top = x; }
  s.sum += power(x, base_of(s.top));
}
DI void observe8(Softmax& s, const float* f) {
  float top = f[0];
#pragma unroll
  for (int e = 1; e < 8; e++) top = fmaxf(top, f[e]);
  if (top > s.top) { s.sum *= power(s.top, top); s.top = top; }
  const float base = base_of(s.top);
#pragma unroll
  for (int e = 0; e < 8; e++) s.sum += power(f[e], base);
}
DI void load8b(const store_t* x, const float* bias, float* f) {
  load8(x, f);
  if (!bias) return;
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] = round_store(f[e] + bias[e]);
}
DI float load1b(const store_t* x, const float* bias, int c) { return bias ? round_store(load1(x + c) + bias[c]) : load1(x + c); }

// rows of a grid of blocks of 256 threads: GROUP threads a row
struct Place { u64 row; int lane; };
DI Place place() { Place p; p.row = (u64)blockIdx.x * (256 / GROUP) + threadIdx.x / GROUP; p.lane = threadIdx.x % GROUP; return p; }
DI void store_zeros(store_t* d, int V, int lane) {
  if (!d) return;
  const float zero[8] = {};
  along(d, true, V, lane, [&](int c) { store8(d + c, zero); }, [&](int c) { store1(d + c, 0.f); });
}

KERNEL __launch_bounds__(256) cross_entropy_read(const store_t* logits, store_t* gradient, const i64* targets, const float* bias, float* losses,
                                                const float* weight, const float* grad_scale, int V, int R) {
  const Place at = place();
  if (at.row >= R) return;
  const i64 target = targets[at.row];
  const store_t* x = logits + at.row * V;
  store_t* d = gradient ? gradient + at.row * V : gradient;
  if (target < 0) {
    if (at.lane == 0) losses[at.row] = 0.f;
    return store_zeros(d, V, at.lane);
  }
  const bool known = target < V;
  const float whole = known ? *weight * *grad_scale : not_a_number(), own = known ? load1b(x, bias, (int)target) : not_a_number();
  Softmax mine; mine.top = -INF; mine.sum = 0.f;
  along(x, true, V, at.lane,
        [&](int c) { float f[8]; load8b(x + c, bias ? bias + c : bias, f); observe8(mine, f); },
        [&](int c) { observe(mine, load1b(x, bias, c)); });
  const Softmax all = joined<GROUP / 32>(mine);
  if (at.lane == 0) losses[at.row] = logf(all.sum) + (all.top - own);
  if (!d) return;
  const float factor = whole * rcp(all.sum);
  along(x, alike(x, d), V, at.lane,
        [&](int c) {
          float f[8]; load8b(x + c, bias ? bias + c : bias, f);
          softmax_gradient(f, all, factor, target - c);
          store8(d + c, f);
        },
        [&](int c) {
          const float f = power(load1b(x, bias, c), all.top);
          store1(d + c, (c == target ? f - all.sum : f) * factor);
        });
}
EXPORT(cross_entropy_read)

#define SMALLEST_PROBABILITY 1e-12f
KERNEL __launch_bounds__(256) probability_cost(const store_t* probabilities, store_t* gradient, const i64* targets, float* losses,
                                              const float* weight, const float* grad_scale, int V, int R) {
  const Place at = place();
  if (at.row >= R) return;
  const i64 target = targets[at.row];
  const bool known = target < V;
  store_t* d = gradient + at.row * V;
  float loss = 0.f, own = 0.f;
  if (target >= 0) {
    const float p = known ? load1(probabilities + at.row * V + target) : not_a_number();
    loss = -logf(p < SMALLEST_PROBABILITY ? SMALLEST_PROBABILITY : p);
    own = p <= SMALLEST_PROBABILITY ? 0.f : -(*weight * *grad_scale) / p;
  }
  if (at.lane == 0) losses[at.row] = loss;
  const float other = known ? 0.f : not_a_number();
  along(d, true, V, at.lane,
        [&](int c) {
          float f[8];
#pragma unroll
          for (int e = 0; e < 8; e++) f[e] = c + e == target ? own : other;
          store8(d + c, f);
        },
        [&](int c) { store1(d + c, c == target ? own : other); });
}
EXPORT(probability_cost)

// Mean over F features of (x - target)^2. `wanted` holds numbers shaped as x, or is null: then `ids` stand for one-hot rows.
KERNEL __launch_bounds__(256) squared_error(const store_t* numbers, const store_t* wanted, const i64* ids, store_t* gradient, float* losses,
                                           const float* weight, const float* grad_scale, int F, int R) {
  const Place at = place();
  if (at.row >= R) return;
  const store_t *x = numbers + at.row * F, *y = wanted ? wanted + at.row * F : x;
  store_t* d = gradient + at.row * F;
  const i64 id = wanted ? 0 : ids[at.row];
  if (id < 0) {
    if (at.lane == 0) losses[at.row] = 0.f;
    return store_zeros(d, F, at.lane);
  }
  const float factor = id < F ? 2.f * *weight * *grad_scale / F : not_a_number();
  float sum = 0.f;
  along(x, alike(x, y) && alike(x, d), F, at.lane,
        [&](int c) {
          float f[8], t[8]; load8(x + c, f);
          if (wanted) load8(y + c, t);
#pragma unroll
          for (int e = 0; e < 8; e++) {
            f[e] -= wanted ? t[e] : c + e == id ? 1.f : 0.f;
            sum += f[e] * f[e];
            f[e] *= factor;
          }
          store8(d + c, f);
        },
        [&](int c) {
          const float f = load1(x + c) - (wanted ? load1(y + c) : c == id ? 1.f : 0.f);
          sum += f * f;
          store1(d + c, f * factor);
        });
  sum = joined_sum<GROUP / 32>(sum);
  if (at.lane == 0) losses[at.row] = id < F ? sum / F : not_a_number();
}
EXPORT(squared_error)

// weight * the sum of R losses, in float64. One block.
KERNEL __launch_bounds__(1024) total_loss(const float* losses, const float* weight, double* total, int R) {
  __shared__ double sums[32];
  double s = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < R; i += 1024) s += losses[i];
  s = block_sum<32>(s, sums);
  if (threadIdx.x == 0) *total = *weight * s;
}
EXPORT(total_loss)
