// q and k as attention reads them: with their bias, and neighbouring pairs turned by the angle of their position. In place.
// GROUP 8: a thread takes eight neighbours (HEAD_DIM is a multiple of 8); GROUP 1: a pair, or what is left of one.
#include "group.cuh"
constexpr int AT_ONCE = GROUP == 8 ? 8 : 2, PER_HEAD = (HEAD_DIM + AT_ONCE - 1) / AT_ONCE;
#if GROUP == 8
typedef u32 index_t;  // reaches further than memory
#else
typedef u64 index_t;
#endif

// qkv [rows][3][H][HEAD_DIM], rows = batch * T; turns [>= T][HEAD_DIM / 2] (cos, sin) or null; bias [3][H][HEAD_DIM] or null
KERNEL __launch_bounds__(256) turn(store_t* qkv, const float2* turns, const param_t* bias, u64 rows, int T, int H) {
  const index_t i = (index_t)blockIdx.x * 256 + threadIdx.x, per_row = 2 * H * PER_HEAD, row = i / per_row;
  if (row >= rows) return;
  const int of_row = (int)(i - row * per_row), head = of_row / PER_HEAD, c = of_row % PER_HEAD * AT_ONCE, column = head * HEAD_DIM + c;
  const float2* w = turns ? turns + (int)(row % T) * (HEAD_DIM / 2) + c / 2 : turns;
  store_t* p = qkv + (u64)row * 3 * H * HEAD_DIM + column;
#if GROUP == 8
  float f[8], b[8], cs[8];
  load8(p, f);
  load_optional(bias, column, b);
#pragma unroll
  for (int e = 0; e < 8; e++) f[e] += b[e];
  if (turns) {
    load8f((const float*)w, cs);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float even = f[e], odd = f[e + 1];
      f[e] = even * cs[e] - odd * cs[e + 1]; f[e + 1] = even * cs[e + 1] + odd * cs[e];
    }
  }
  store8(p, f);
#else
  const bool both = c + 1 < HEAD_DIM;
  float even = load1(p), odd = both ? load1(p + 1) : 0.f, b;
  load_optional(bias, column, &b);
  even += b;
  if (both) { load_optional(bias, column + 1, &b); odd += b; }
  if (turns) {
    const float turned = even * w->x - odd * w->y;
    odd = even * w->y + odd * w->x;
    even = turned;
  }
  store1(p, even);
  if (both) store1(p + 1, odd);
#endif
}
EXPORT(turn)
