// What only sm_90 has: warpgroup products, tensor maps, mbarriers. Products are done when they are issued.
#pragma once
typedef emulator::TensorMap TMap;
#define TMAP const TMap
DI void wg_fence() {}
DI void wg_commit() {}
template <int N> static inline void wg_wait() {}
template <int N> static inline void pin(float*) {}
template <int TA, int TB> static inline void wgmma64_ss(float* d, u64 a, u64 b, int add) {
  emulator::multiply_group(d, &a, nullptr, b, 64, TA, TB, add, STORAGE == 2);
}
template <int TB> static inline void wgmma64_rs(float* d, const u32* a, u64 b, int add) {
  emulator::multiply_group(d, nullptr, a, b, 64, false, TB, add, STORAGE == 2);
}

DI void mbar_init(u32 bar, u32 count) { emulator::barrier_init(bar, count); }
DI void mbar_fence() {}
DI void mbar_arrive(u32 bar) { emulator::barrier_arrive(bar, 0); }
DI void mbar_expect(u32 bar, u32 bytes) { emulator::barrier_arrive(bar, bytes); }
DI void mbar_wait(u32 bar, u32 parity) { emulator::barrier_wait(bar, parity); }
DI void tma4(u32 to, const TMap& m, u32 bar, int c0, int c1, int c2, int c3) {
  const int at[4] = {c0, c1, c2, c3};
  emulator::tensor_load(to, m, bar, at);
}
DI void bulk1(u32 to, const void* from, u32 bytes, u32 bar) { emulator::bulk_load(to, from, bytes, bar); }
DI u32 hmul2(u32 a, u32 b) {
  u32 r = 0;
  for (int i = 0; i < 32; i += 16) {
#if STORAGE == 2
    const float f = bits_float(a >> i << 16) * bits_float(b >> i << 16);
    const u32 bits = float_bits(f);
    r |= (f != f ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16) << i;
#else
    r |= (u32)float_to_half(half_to_float((u16)(a >> i)) * half_to_float((u16)(b >> i))) << i;
#endif
  }
  return r;
}
