// Products of a warpgroup (sm_90a): m64n64k16, fp32 sums, operands float16 or bfloat16 (STORAGE), b always in shared memory.
// Rule: wg_fence before a product whose registers were touched; wg_commit ends a group; after wg_wait<n> at most n groups are under
// way, and `pin` keeps reads of an accumulator behind that wait. The emulator brings its own.
#pragma once
#include "device.cuh"
#ifndef EMULATED
DI void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DI void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int N> DI void pin(float* d) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// d = a b (+ d if acc). TA, TB: 0 if the operand's rows run along k, 1 if they run along m or n.
template <int TA, int TB> DI void wgmma64_ss(float* d, u64 a, u64 b, int acc) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPES " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, %35, %36;}"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "l"(a), "l"(b), "r"(acc), "n"(TA), "n"(TB));
}
// the same with a in registers, as an mma.sync operand
template <int TB> DI void wgmma64_rs(float* d, const u32* a, u64 b, int acc) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPES " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(acc), "n"(TB));
}
#if STORAGE == 2
#define PAIR_TYPE "bf16x2"
#else
#define PAIR_TYPE "f16x2"
#endif
DI u32 hmul2(u32 a, u32 b) { u32 r; asm("mul.rn." PAIR_TYPE " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI bool any_(bool p) { return __any_sync(0xffffffffu, p); }
#endif
#define WG_K 2u       // descriptor step: 16 columns of an operand whose rows run along k (32 bytes)
#define WG_R 128u     // descriptor step: 16 rows of one whose rows run along n (2,048 bytes)
#define WG_TILE 512u  // descriptor step: one tile of 64 x 64 (8,192 bytes)
// descriptor of [rows][64] 16-bit numbers with the 128-byte swizzle at a 1024-byte boundary: groups of eight rows lie 1,024 bytes apart
DI u64 wg_desc(u32 addr) { return (u64)((addr & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }
