// Memory moved as it is: pieces of rows, and numbers that come with the launch.
#include "device.cuh"

// UNIT bytes at a time
#ifndef UNIT
#define UNIT 16
#endif
#if UNIT == 16
typedef V4 unit_t;
#elif UNIT == 8
typedef u64 unit_t;
#elif UNIT == 4
typedef u32 unit_t;
#else
typedef u16 unit_t;
#endif

// `rows` pieces of `width` units, which start `from_pitch` units apart, to places `to_pitch` apart; `lanes` threads (a power of two) per row
KERNEL __launch_bounds__(256) move_rows(const void* source, void* into, u64 rows, u64 width, u64 from_pitch, u64 to_pitch, int lanes) {
  const u64 row = (u64)blockIdx.x * (256 / lanes) + threadIdx.x / lanes;
  if (row >= rows) return;
  const unit_t* from = (const unit_t*)source + row * from_pitch;
  unit_t* to = (unit_t*)into + row * to_pitch;
  for (u64 i = threadIdx.x & (lanes - 1); i < width; i += lanes) to[i] = from[i];
} EXPORT(move_rows)

// 32-bit numbers that the host knows now
struct Words { u32* at[16]; u32 value[16]; };
KERNEL __launch_bounds__(32) set_words(const Words words, int count) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    if (i < count && threadIdx.x == i) *words.at[i] = words.value[i];
  }
} EXPORT(set_words)
