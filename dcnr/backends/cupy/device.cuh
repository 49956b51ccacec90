// Device primitives: 16-byte vectors, packed pairs of 16-bit numbers, mma.sync, ldmatrix, cp.async, warp sums, Philox.
// No CUDA header is included, so that NVRTC needs no toolkit. Compiled with -DEMULATED, the CPU emulator of the tests takes their place.
// STORAGE says what arrays hold: 1 float16, 2 bfloat16, 3 float32. Arithmetic and sums are float32.
#pragma once
#ifndef STORAGE
#define STORAGE 1
#endif
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#ifdef EMULATED
#include "emulator.h"
#else
#define DI __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define EXPORT(name)
struct __align__(16) V4 { u32 x, y, z, w; };
DI float half_to_float(u16 v) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v)); return f; }
DI u16 float_to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
DI u32 pack_half2(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
#else
DI u32 pack_half2(float lo, float hi) { return (u32)float_to_half(lo) | (u32)float_to_half(hi) << 16; }
#endif
DI float2 unpack_half2(u32 v) {
  float2 f;
  asm("{.reg .f16 l,h; mov.b32 {l,h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(f.x), "=f"(f.y) : "r"(v));
  return f;
}
DI float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float lg2(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float rcp(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float rsq(float x) { return rsqrtf(x); }
DI u32 mulhi(u32 a, u32 b) { return __umulhi(a, b); }
DI u32 float_bits(float f) { return __float_as_uint(f); }
DI float bits_float(u32 v) { return __uint_as_float(v); }
DI float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DI V4 ldg16(const void* p) { return *(const V4*)p; }
DI void stg16(void* p, V4 v) { *(V4*)p = v; }
DI u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define INF __int_as_float(0x7f800000)
#if STORAGE == 2
#define MMA_TYPES "bf16.bf16"
#else
#define MMA_TYPES "f16.f16"
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
DI void mma16816(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DI void ldsm4(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
DI void ldsm4t(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
DI void cp16(u32 dst, const void* src, bool ok) {  // zero-fills when !ok
  int n = ok ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n));
}
DI void cp4(u32 dst, const void* src, bool ok) {
  int n = ok ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(n));
}
DI void cp_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> DI void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
#endif
DI V4 lds16(u32 a) { V4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)); return v; }
DI float2 lds8(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
DI float lds4f(u32 a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a)); return v; }
DI void sts4(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v)); }
DI void sts16(u32 a, V4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)); }
#endif

// --- numbers that are STORED in a way known at compilation: 1 float16, 2 bfloat16, 3 float32 ---
template <int STORED> DI float2 unpack_pair(u32 v) {
  if (STORED != 2) return unpack_half2(v);
  float2 f; f.x = bits_float(v << 16); f.y = bits_float(v & 0xffff0000u);
  return f;
}
template <int STORED> DI float load1_of(const void* p, u64 at) { return STORED == 3 ? ((const float*)p)[at] : unpack_pair<STORED>(((const u16*)p)[at]).x; }

// four and eight neighbours, at a 16-byte boundary
DI V4 bits4(const float* f) { V4 v; v.x = float_bits(f[0]); v.y = float_bits(f[1]); v.z = float_bits(f[2]); v.w = float_bits(f[3]); return v; }
DI void floats4(const V4& v, float* f) { f[0] = bits_float(v.x); f[1] = bits_float(v.y); f[2] = bits_float(v.z); f[3] = bits_float(v.w); }
DI void load4f(const float* p, float* f) { floats4(ldg16(p), f); }
DI void store4f(float* p, const float* f) { stg16(p, bits4(f)); }
DI void load8f(const float* p, float* f) {
  const V4 a = ldg16(p), b = ldg16(p + 4);
  floats4(a, f); floats4(b, f + 4);
}
DI void store8f(float* p, const float* f) { store4f(p, f); store4f(p + 4, f + 4); }
template <int STORED> DI void floats8(const V4& v, float* f) {  // of 16 bits each
  const float2 a = unpack_pair<STORED>(v.x), b = unpack_pair<STORED>(v.y), c = unpack_pair<STORED>(v.z), d = unpack_pair<STORED>(v.w);
  f[0] = a.x; f[1] = a.y; f[2] = b.x; f[3] = b.y; f[4] = c.x; f[5] = c.y; f[6] = d.x; f[7] = d.y;
}
template <int STORED> DI void load8_of(const void* p, float* f) {
  if (STORED == 3) load8f((const float*)p, f);
  else floats8<STORED>(ldg16(p), f);
}

// --- what arrays hold; V8 is eight neighbours as loaded: unpack later, so that several loads are in flight ---
#if STORAGE == 3
typedef float store_t;
DI void store1(store_t* p, float f) { *p = f; }
DI float round_store(float f) { return f; }
struct V8 { V4 a, b; };
DI V8 fetch8(const store_t* p) { V8 v; v.a = ldg16(p); v.b = ldg16(p + 4); return v; }
DI void unpack8(const V8& v, float* f) { floats4(v.a, f); floats4(v.b, f + 4); }
DI V8 pack8(const float* f) { V8 v; v.a = bits4(f); v.b = bits4(f + 4); return v; }
DI void put8(store_t* p, const V8& v) { stg16(p, v.a); stg16(p + 4, v.b); }
#else
typedef u16 store_t;
#if STORAGE == 2
DI u32 pack2(float lo, float hi) {  // to nearest even, as cvt.rn.bf16x2.f32
#if defined(EMULATED) || __CUDA_ARCH__ < 800
  const u32 l = float_bits(lo), h = float_bits(hi);
  const u32 a = lo != lo ? 0x7fffu : (l + 0x7fffu + ((l >> 16) & 1u)) >> 16, b = hi != hi ? 0x7fffu : (h + 0x7fffu + ((h >> 16) & 1u)) >> 16;
  return a | b << 16;
#else
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
#endif
}
DI float2 unpack2(u32 v) { return unpack_pair<2>(v); }
#else
DI u32 pack2(float lo, float hi) { return pack_half2(lo, hi); }
DI float2 unpack2(u32 v) { return unpack_pair<1>(v); }
#endif
DI void store1(store_t* p, float f) { *p = (u16)(pack2(f, 0.f) & 0xffffu); }
DI float round_store(float f) { return unpack2(pack2(f, 0.f)).x; }
typedef V4 V8;
DI V8 fetch8(const store_t* p) { return ldg16(p); }
DI void unpack8(const V8& v, float* f) { floats8<STORAGE>(v, f); }
DI V8 pack8(const float* f) {
  V8 v; v.x = pack2(f[0], f[1]); v.y = pack2(f[2], f[3]); v.z = pack2(f[4], f[5]); v.w = pack2(f[6], f[7]);
  return v;
}
DI void put8(store_t* p, const V8& v) { stg16(p, v); }
#endif
DI float load1(const store_t* p) { return load1_of<STORAGE>(p, 0); }
DI void load8(const store_t* p, float* f) { unpack8(fetch8(p), f); }
DI void store8(store_t* p, const float* f) { put8(p, pack8(f)); }

// --- sums over a warp, always in the same order ---
DI float warp_sum(float v) {
  v += shuffle_xor(v, 16); v += shuffle_xor(v, 8); v += shuffle_xor(v, 4); v += shuffle_xor(v, 2); v += shuffle_xor(v, 1);
  return v;
}
DI float warp_max(float v) {
  v = fmaxf(v, shuffle_xor(v, 16)); v = fmaxf(v, shuffle_xor(v, 8)); v = fmaxf(v, shuffle_xor(v, 4));
  v = fmaxf(v, shuffle_xor(v, 2)); v = fmaxf(v, shuffle_xor(v, 1));
  return v;
}

// --- Philox 4x32-10 (Salmon et al. 2011): counter (c0, c1, c2, c3), key (k0, k1) ---
DI V4 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 h0 = mulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = mulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    const u32 n0 = h1 ^ c1 ^ k0, n2 = h0 ^ c3 ^ k1;
    c0 = n0; c1 = l1; c2 = n2; c3 = l0;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  V4 v; v.x = c0; v.y = c1; v.z = c2; v.w = c3;
  return v;
}
// A mask as `backends.base.Philox` lays it down; passed to kernels by value, `step` read on the device. `group.cuh` applies it.
struct Mask { const u32* step; u64 offset; u32 stream, key0, key1, threshold; float scale; u32 pad; };
