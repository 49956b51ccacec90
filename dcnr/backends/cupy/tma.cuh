// Tiles brought by TMA, and the mbarriers that say when they are there (sm_90). The host makes the tensor maps; they are passed by value.
// A barrier's phase ends when its one arrival (`mbar_expect`) and all announced bytes have come; waiting for parity p is waiting for
// the end of a phase of that parity. The emulator brings its own.
#pragma once
#include "device.cuh"
#ifndef EMULATED
struct __align__(64) TMap { u64 words[16]; };
#define TMAP const __grid_constant__ TMap
DI void mbar_init(u32 bar, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory"); }
DI void mbar_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DI void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DI void mbar_wait(u32 bar, u32 parity) {
  u32 ok;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  } while (!ok);
}
// the box at coordinates c0 (innermost) … c3, to a 1024-byte boundary; what lies outside the tensor arrives as zeros
DI void tma4(u32 dst, const TMap& m, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
               ::"r"(dst), "l"(&m), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar) : "memory");
}
DI void bulk1(u32 dst, const void* src, u32 bytes, u32 bar) {  // plain bytes: 16-byte aligned, a multiple of 16
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
#endif
