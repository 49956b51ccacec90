// GROUP neighbours at a time: 8, which is one 16-byte vector of 16-bit numbers, where widths and addresses allow it; 1 everywhere else.
// PARAMETER says what gains and biases hold, as STORAGE does for arrays.
#pragma once
#include "device.cuh"

#if GROUP == 8
typedef V8 Raw;
DI Raw fetch_group(const store_t* p) { return fetch8(p); }
DI void unpack_group(const Raw& v, float* f) { unpack8(v, f); }
DI void store_group(store_t* p, const float* f) { store8(p, f); }
#else
typedef store_t Raw;
DI Raw fetch_group(const store_t* p) { return *p; }
DI void unpack_group(const Raw& v, float* f) { f[0] = load1(&v); }
DI void store_group(store_t* p, const float* f) { store1(p, f[0]); }
#endif
DI void load_group(const store_t* p, float* f) { unpack_group(fetch_group(p), f); }
DI void store_rounded(store_t* p, float* f) {  // and leave in `f` what was stored
#if GROUP == 8
  const V8 v = pack8(f);
  put8(p, v);
  unpack8(v, f);
#else
  f[0] = round_store(f[0]);
  store1(p, f[0]);
#endif
}

#ifdef PARAMETER
#if PARAMETER == 3
typedef float param_t;
#else
typedef u16 param_t;
#endif
DI void load_parameters(const param_t* p, float* f) {
#if GROUP == 8
  load8_of<PARAMETER>(p, f);
#else
  f[0] = load1_of<PARAMETER>(p, 0);
#endif
}
// those of `p`, or zeros
DI void load_optional(const param_t* p, u64 at, float* f) {
#pragma unroll
  for (int e = 0; e < GROUP; e++) f[e] = 0.f;
  if (p) load_parameters(p + at, f);
}
#endif

// Drop or scale the group of elements from `at` (an index in the array) on. What is dropped is 0 even if it was not finite.
DI void drop_group(const Mask& m, u32 step, u64 at, float* f) {
  const u64 element = m.offset + at, block = element >> 3;
  const V4 r = philox((u32)block, (u32)(block >> 32), m.stream, step, m.key0, m.key1);
#if GROUP == 8
  const u32 w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f[2 * i] = (w[i] & 0xffffu) >= m.threshold ? f[2 * i] * m.scale : 0.f;
    f[2 * i + 1] = (w[i] >> 16) >= m.threshold ? f[2 * i + 1] * m.scale : 0.f;
  }
#else
  const u32 half = (u32)element & 7u, low = half & 2u ? r.y : r.x, high = half & 2u ? r.w : r.z, word = half & 4u ? high : low;
  f[0] = (half & 1u ? word >> 16 : word & 0xffffu) >= m.threshold ? f[0] * m.scale : 0.f;
#endif
}
