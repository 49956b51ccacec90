// The words of CUDA and of `device.cuh` for a kernel that is compiled for the CPU; `runtime.h` does the work.
// No C++ header is included: reading those takes longer than compiling most kernels.
#pragma once
#include "runtime.h"
extern "C" {
void* memcpy(void*, const void*, size_t);
void* memset(void*, int, size_t);
int printf(const char*, ...);
double exp(double), log(double), sqrt(double), pow(double, double), sin(double), cos(double), fabs(double), floor(double), ceil(double);
double fma(double, double, double), fmin(double, double), fmax(double, double), erf(double), exp2(double), log2(double), rint(double);
float expf(float), exp2f(float), expm1f(float), logf(float), log2f(float), log1pf(float), sqrtf(float), powf(float, float), tanhf(float);
float sinf(float), cosf(float), erff(float), erfcf(float), fabsf(float), floorf(float), ceilf(float), rintf(float), roundf(float);
float fmaf(float, float, float), fminf(float, float), fmaxf(float, float), fmodf(float, float), copysignf(float, float), ldexpf(float, int);
void sincosf(float, float*, float*), sincos(double, double*, double*);
}
namespace emulator {
template <class T> struct Plain { typedef T type; static const bool is_float = false, is_integer = false; };
#define EMULATED_NUMBER(T, f, i) template <> struct Plain<T> { typedef T type; static const bool is_float = f, is_integer = i; };
EMULATED_NUMBER(float, true, false) EMULATED_NUMBER(double, true, false) EMULATED_NUMBER(bool, false, true) EMULATED_NUMBER(char, false, true)
EMULATED_NUMBER(signed char, false, true) EMULATED_NUMBER(unsigned char, false, true) EMULATED_NUMBER(short, false, true)
EMULATED_NUMBER(u16, false, true) EMULATED_NUMBER(int, false, true) EMULATED_NUMBER(u32, false, true) EMULATED_NUMBER(long, false, true)
EMULATED_NUMBER(unsigned long, false, true) EMULATED_NUMBER(long long, false, true) EMULATED_NUMBER(u64, false, true)
#undef EMULATED_NUMBER
template <class T> struct Plain<const T> : Plain<T> {};
template <class T> struct Plain<volatile T> : Plain<T> {};
template <class T> struct Plain<const volatile T> : Plain<T> {};
template <int... I> struct Indices {};
template <int N, int... I> struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <int... I> struct UpTo<0, I...> { typedef Indices<I...> type; };
}  // namespace emulator

// --- language ---
#define DI static inline
#define KERNEL static void
#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("emulated_shared")))
#define __align__(n) alignas(n)
#define blockIdx (::emulator::block)
#define gridDim (::emulator::blocks)
#define blockDim (::emulator::threads)
#define threadIdx (::emulator::self->thread)
#define warpSize 32
#define INF __builtin_inff()
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(16) V4 { u32 x, y, z, w; };
DI float2 make_float2(float x, float y) { return {x, y}; }
DI float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DI int2 make_int2(int x, int y) { return {x, y}; }
DI uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DI uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// --- numbers ---
namespace emulator {
template <class To, class From> static inline To same_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "");
  memcpy(&to, &from, sizeof to);
  return to;
}
}
DI float half_to_float(u16 v) { return (float)emulator::same_bits<_Float16>(v); }
DI u16 float_to_half(float f) { return emulator::same_bits<u16>((_Float16)f); }
DI u32 pack_half2(float lo, float hi) { return (u32)float_to_half(lo) | (u32)float_to_half(hi) << 16; }
DI float2 unpack_half2(u32 v) { return {half_to_float((u16)v), half_to_float((u16)(v >> 16))}; }
DI u32 float_bits(float f) { return emulator::same_bits<u32>(f); }
DI float bits_float(u32 v) { return emulator::same_bits<float>(v); }
DI float ex2(float x) { return exp2f(x); }
DI float lg2(float x) { return log2f(x); }
DI float rcp(float x) { return 1.f / x; }
DI float rsq(float x) { return 1.f / sqrtf(x); }
DI u32 mulhi(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
DI float __int_as_float(int v) { return emulator::same_bits<float>(v); }
DI int __float_as_int(float v) { return emulator::same_bits<int>(v); }
DI float __uint_as_float(u32 v) { return bits_float(v); }
DI u32 __float_as_uint(float v) { return float_bits(v); }
DI double __longlong_as_double(long long v) { return emulator::same_bits<double>(v); }
DI long long __double_as_longlong(double v) { return emulator::same_bits<long long>(v); }
DI u32 __umulhi(u32 a, u32 b) { return mulhi(a, b); }
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
DI float __fdividef(float a, float b) { return a / b; }
DI float __frcp_rn(float x) { return 1.f / x; }
DI float __fsqrt_rn(float x) { return sqrtf(x); }
DI float __fdiv_rn(float a, float b) { return a / b; }
DI float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
DI float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
DI float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
DI double __dadd_rn(double a, double b) { volatile double r = a + b; return r; }
DI double __dmul_rn(double a, double b) { volatile double r = a * b; return r; }
DI float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
DI float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
DI float rsqrtf(float x) { return 1.f / sqrtf(x); }
DI double rsqrt(double x) { return 1. / sqrt(x); }
DI float __saturatef(float x) { return x < 0.f || x != x ? 0.f : x > 1.f ? 1.f : x; }
DI int __float2int_rn(float x) { return (int)rintf(x); }
DI int __float2int_rz(float x) { return (int)x; }
DI float __int2float_rn(int x) { return (float)x; }
DI float __uint2float_rn(u32 x) { return (float)x; }
DI float __double2float_rn(double x) { return (float)x; }
DI int __popc(u32 x) { return __builtin_popcount(x); }
DI int __popcll(u64 x) { return __builtin_popcountll(x); }
DI int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
DI int __clzll(long long x) { return x ? __builtin_clzll((u64)x) : 64; }
DI int __ffs(int x) { return __builtin_ffs(x); }
DI void sincospif(float x, float* s, float* c) { *s = (float)sin(3.14159265358979323846 * x); *c = (float)cos(3.14159265358979323846 * x); }
template <class A, class B> using Common = decltype(true ? A() : B());
template <class A, class B> static inline Common<A, B> min(A a, B b) { return (Common<A, B>)a < (Common<A, B>)b ? a : b; }
template <class A, class B> static inline Common<A, B> max(A a, B b) { return (Common<A, B>)a > (Common<A, B>)b ? a : b; }
DI bool isfinite(double x) { return __builtin_isfinite(x); }
DI bool isnan(double x) { return x != x; }
DI bool isinf(double x) { return __builtin_isinf(x); }

// --- memory ---
template <class T> static inline T __ldg(const T* p) {
  if ((u64)p % sizeof(T)) emulator::fail("%zu bytes read from unaligned %p", sizeof(T), p);
  return *p;
}
template <class T> static inline void __stcs(T* p, T v) {
  if ((u64)p % sizeof(T)) emulator::fail("%zu bytes written to unaligned %p", sizeof(T), p);
  *p = v;
}
DI V4 ldg16(const void* p) { return __ldg((const V4*)p); }
DI void stg16(void* p, V4 v) { __stcs((V4*)p, v); }
template <class T> static inline T __ldcs(const T* p) { return __ldg(p); }
template <class T> static inline T __ldcg(const T* p) { return __ldg(p); }
template <class T> static inline void __stcg(T* p, T v) { __stcs(p, v); }
DI u32 smem_addr(const void* p) { return emulator::address_of(p); }
template <class T> static inline T emulated_load(u32 a) { T v; memcpy(&v, emulator::at(a, sizeof v), sizeof v); return v; }
DI V4 lds16(u32 a) { return emulated_load<V4>(a); }
DI float2 lds8(u32 a) { return emulated_load<float2>(a); }
DI float lds4f(u32 a) { return emulated_load<float>(a); }
DI u32 lds4(u32 a) { return emulated_load<u32>(a); }
DI void sts4(u32 a, u32 v) { memcpy(emulator::at(a, 4), &v, 4); }
DI void sts16(u32 a, V4 v) { memcpy(emulator::at(a, 16), &v, 16); }
DI void cp16(u32 to, const void* from, bool ok) { emulator::copy_async(to, from, 16, ok); }
DI void cp4(u32 to, const void* from, bool ok) { emulator::copy_async(to, from, 4, ok); }
DI void cp_commit() { emulator::commit_copies(); }
template <int N> static inline void cp_wait() { emulator::wait_copies(N); }
DI void __threadfence() {}
DI void __threadfence_block() {}
template <class T> static inline T atomicAdd(T* p, T v) {
  static_assert(emulator::Plain<T>::is_integer, "sums of floats by atomics depend on their order");
  const T old = *p;
  *p = old + v;
  return old;
}
template <class T> static inline T atomicMax(T* p, T v) { const T old = *p; if (v > old) *p = v; return old; }
template <class T> static inline T atomicMin(T* p, T v) { const T old = *p; if (v < old) *p = v; return old; }
template <class T> static inline T atomicOr(T* p, T v) { const T old = *p; *p = old | v; return old; }
template <class T> static inline T atomicAnd(T* p, T v) { const T old = *p; *p = old & v; return old; }
template <class T> static inline T atomicExch(T* p, T v) { const T old = *p; *p = v; return old; }
template <class T> static inline T atomicCAS(T* p, T expected, T v) { const T old = *p; if (old == expected) *p = v; return old; }
DI u32 atomicInc(u32* p, u32 limit) { const u32 old = *p; *p = old >= limit ? 0 : old + 1; return old; }

// --- threads of a block ---
DI void __syncthreads() { emulator::sync_block(); }
DI int __syncthreads_or(int p) {
  __shared__ int any;
  any = 0;
  emulator::sync_block();
  if (p) any = 1;
  emulator::sync_block();
  const int r = any;
  emulator::sync_block();
  return r;
}
DI int __syncthreads_and(int p) { return !__syncthreads_or(!p); }
DI void __syncwarp(u32 mask = 0xffffffffu) { emulator::check_mask(mask); emulator::exchange({}); }
namespace emulator {
template <class T> static inline T shuffle(u32 mask, T v, int from) {
  static_assert(sizeof(T) <= 8, "");
  check_mask(mask);
  Slot mine = {};
  memcpy(mine.word, &v, sizeof v);
  const Slot* slots = exchange(mine);
  T r;
  memcpy(&r, slots[from & 31].word, sizeof r);
  return r;
}
static inline u32 ballot(u32 mask, bool p) {
  check_mask(mask);
  const int alive = self->warp->alive;
  const Slot* slots = exchange({{(u64)p}});
  u32 r = 0;
  for (int i = 0; i < 32 && i < alive; i++) r |= (u32)(slots[i].word[0] & 1) << i;
  return r;
}
}  // namespace emulator
template <class T> static inline T __shfl_sync(u32 mask, T v, int from, int width = 32) {
  return emulator::shuffle(mask, v, (emulator::self->lane & -width) + (from & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(u32 mask, T v, int bits, int width = 32) {
  const int l = emulator::self->lane;
  return emulator::shuffle(mask, v, ((l ^ bits) & -width) > (l & -width) ? l : l ^ bits);
}
template <class T> static inline T __shfl_up_sync(u32 mask, T v, int by, int width = 32) {
  const int l = emulator::self->lane;
  return emulator::shuffle(mask, v, (l & (width - 1)) < by ? l : l - by);
}
template <class T> static inline T __shfl_down_sync(u32 mask, T v, int by, int width = 32) {
  const int l = emulator::self->lane;
  return emulator::shuffle(mask, v, (l & (width - 1)) + by >= width ? l : l + by);
}
DI u32 __ballot_sync(u32 mask, bool p) { return emulator::ballot(mask, p); }
DI bool __any_sync(u32 mask, bool p) { return emulator::ballot(mask, p) != 0; }
DI bool __all_sync(u32 mask, bool p) { return emulator::ballot(mask, !p) == 0; }
DI bool any_(bool p) { return __any_sync(0xffffffffu, p); }
DI float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

// --- tensor cores ---
#ifndef STORAGE
#define STORAGE 1
#endif
DI void ldsm4(u32* r, u32 a) { emulator::load_matrices(r, a, false); }
DI void ldsm4t(u32* r, u32 a) { emulator::load_matrices(r, a, true); }
DI void mma16816(float* c, const u32* a, u32 b0, u32 b1) { emulator::multiply_warp(c, a, b0, b1, STORAGE == 2); }
#include "hopper.h"

// --- how the launcher finds a kernel: its arguments come as the driver takes them, one address each ---
extern "C" __attribute__((weak, visibility("hidden"))) char __start_emulated_shared[], __stop_emulated_shared[];
namespace emulator {
// what a parameter is, as a letter: numbers small, pointers to them large
template <class T> struct Code {
  static const int size = sizeof(T);
  static const char integer = size == 8 ? 'l' : size == 4 ? 'i' : 'h';
  static const char value = Plain<T>::is_float ? (size == 8 ? 'd' : 'f') : Plain<T>::is_integer ? integer : 's';
};
template <class T> struct Code<T*> {
  static const int size = sizeof(T);
  static const char integer = size == 8 ? 'L' : size == 4 ? 'I' : size == 2 ? 'H' : 'B';
  static const char value = Plain<T>::is_float ? (size == 8 ? 'D' : 'F') : Plain<T>::is_integer ? integer : 'P';
};
template <> struct Code<void*> { static const char value = 'P'; };
template <> struct Code<const void*> { static const char value = 'P'; };
template <auto F> struct Entry;
template <class... A, void (*F)(A...)> struct Entry<F> {
  static void** arguments;
  template <int... I> static void call(Indices<I...>) { F(*(A*)arguments[I]...); }
  static void thread() { call(typename UpTo<sizeof...(A)>::type()); }
  static int launch(const char* name, const Launch* how, void** given, char* message, int room) {
    arguments = given;
    return emulator::launch({name, thread, __start_emulated_shared, __stop_emulated_shared}, *how, message, room);
  }
  static int describe(char* codes, int* sizes) {
    const char c[] = {Code<A>::value..., 0};
    const int s[] = {(int)sizeof(A)..., 0};
    memcpy(codes, c, sizeof c);
    memcpy(sizes, s, sizeof s);
    return (int)sizeof...(A);
  }
};
template <class... A, void (*F)(A...)> void** Entry<F>::arguments;
}  // namespace emulator
#define EXPORT(name) \
  extern "C" int launch_##name(const emulator::Launch* how, void** given, char* message, int room) { \
    return emulator::Entry<name>::launch(#name, how, given, message, room); \
  } \
  extern "C" int describe_##name(char* codes, int* sizes) { return emulator::Entry<name>::describe(codes, sizes); }
