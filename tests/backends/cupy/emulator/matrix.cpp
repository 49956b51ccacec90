// What works on tiles: cp.async, ldmatrix, mma.sync, wgmma, tensor maps and mbarriers, in the layouts that the hardware documents.
// Asynchronous loads land as late as they may: when somebody waits for them.
#include "runtime.h"
#include <math.h>
#include <string.h>
#include <map>
#include <vector>

namespace emulator {
static float number(u16 bits, bool bfloat) {
  float f;
  if (bfloat) { const u32 wide = (u32)bits << 16; memcpy(&f, &wide, 4); return f; }
  _Float16 h;
  memcpy(&h, &bits, 2);
  return (float)h;
}

// --- cp.async ---
void copy_async(u32 to, const void* from, int bytes, bool ok) {
  Fiber& f = *self;
  at(to, bytes);
  if (ok && (u64)from % bytes) fail("cp.async of %d bytes from unaligned %p", bytes, from);
  if (f.count == 512) fail("more than 512 copies in flight");
  f.copies[(f.first + f.count++) % 512] = {to, from, bytes, ok, f.committed};
}
void commit_copies() { self->committed++; }
void wait_copies(unsigned pending) {
  Fiber& f = *self;
  while (f.count && f.copies[f.first].group + pending < f.committed) {
    const Copy& c = f.copies[f.first];
    if (c.ok) memcpy(at(c.to, c.bytes), c.from, c.bytes); else memset(at(c.to, c.bytes), 0, c.bytes);
    f.first = (f.first + 1) % 512; f.count--;
  }
}

// --- ldmatrix ---
void load_matrices(u32* into, u32 address, bool transposed) {
  at(address, 16);
  const Slot* slots = exchange({{address}});
  const int l = self->lane;
  for (int i = 0; i < 4; i++) {
    u16 h[2];
    for (int e = 0; e < 2; e++) {
      const int row = transposed ? 2 * (l & 3) + e : l / 4, column = transposed ? l / 4 : 2 * (l & 3) + e;
      memcpy(&h[e], at((u32)slots[8 * i + row].word[0], 16) + 2 * column, 2);
    }
    into[i] = h[0] | (u32)h[1] << 16;
  }
  exchange({});  // nobody overwrites what another lane still reads
}

// --- products ---
static bool last_of_warp() { const Warp& w = *self->warp; return w.barrier.arrived == w.alive - 1; }
static void whole_warp(const char* what) { if (self->warp->alive != 32) fail("%s with %d of 32 threads", what, self->warp->alive); }
// a warp's 16 x 16 operand from its registers
static void gather_a(float (*a)[16], const Slot* slots, bool bfloat) {
  for (int l = 0; l < 32; l++) {
    const u32* r = (const u32*)slots[l].word[1];
    for (int i = 0; i < 4; i++)
      for (int e = 0; e < 2; e++) a[l / 4 + 8 * (i & 1)][2 * (l & 3) + 8 * (i >> 1) + e] = number((u16)(r[i] >> (16 * e)), bfloat);
  }
}
void multiply_warp(float* c, const u32* a, u32 b0, u32 b1, bool bfloat) {
  whole_warp("mma.sync");
  const Slot mine = {{(u64)c, (u64)a, b0 | (u64)b1 << 32}};
  if (!last_of_warp()) { exchange(mine); return; }
  Warp& w = *self->warp;
  Slot* slots = w.slots[w.barrier.generation & 1];
  slots[self->lane] = mine;
  float A[16][16], B[16][8], C[16][8];
  gather_a(A, slots, bfloat);
  for (int l = 0; l < 32; l++)
    for (int e = 0; e < 4; e++) B[2 * (l & 3) + (e & 1) + 8 * (e >> 1)][l / 4] = number((u16)(slots[l].word[2] >> (16 * e)), bfloat);
  for (int l = 0; l < 32; l++)
    for (int e = 0; e < 4; e++) C[l / 4 + 8 * (e >> 1)][2 * (l & 3) + (e & 1)] = ((float*)slots[l].word[0])[e];
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) C[i][j] += A[i][k] * B[k][j];
  for (int l = 0; l < 32; l++)
    for (int e = 0; e < 4; e++) ((float*)slots[l].word[0])[e] = C[l / 4 + 8 * (e >> 1)][2 * (l & 3) + (e & 1)];
  exchange(mine);
}

// wgmma descriptors: 128-byte swizzle on absolute addresses; start, leading and stride byte offsets in units of 16
static u32 start_of(u64 d) { return (u32)(d & 0x3fff) << 4; }
static u32 leading(u64 d) { return (u32)(d >> 16 & 0x3fff) << 4; }
static u32 stride(u64 d) { return (u32)(d >> 32 & 0x3fff) << 4; }
static float element(u64 d, int mn, int k, bool transposed, bool bfloat) {
  u32 a = start_of(d);
  a += transposed ? (mn / 64) * leading(d) + (mn % 64) * 2 + (k / 8) * stride(d) + (k % 8) * 128 : (mn / 8) * stride(d) + (mn % 8) * 128 + 2 * k;
  a ^= ((a >> 7) & 7) << 4;
  u16 bits;
  memcpy(&bits, at(a, 2), 2);
  return number(bits, bfloat);
}
void multiply_group(float* d, const u64* a, const u32* registers, u64 b, int n, bool transpose_a, bool transpose_b, bool add, bool bfloat) {
  whole_warp("wgmma");
  const Slot mine = {{(u64)d, (u64)registers}};
  if (!last_of_warp()) { exchange(mine); return; }
  Warp& w = *self->warp;
  Slot* slots = w.slots[w.barrier.generation & 1];
  slots[self->lane] = mine;
  static float A[16][16], B[16][256], C[16][256];
  if (!a) gather_a(A, slots, bfloat);
  else
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k++) A[i][k] = element(*a, 16 * (self->thread.x >> 5 & 3) + i, k, transpose_a, bfloat);
  for (int k = 0; k < 16; k++)
    for (int j = 0; j < n; j++) B[k][j] = element(b, j, k, transpose_b, bfloat);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < n / 2; i++) C[l / 4 + 8 * (i >> 1 & 1)][i / 4 * 8 + 2 * (l & 3) + (i & 1)] = add ? ((float*)slots[l].word[0])[i] : 0.f;
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < n; j++) C[i][j] += A[i][k] * B[k][j];
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < n / 2; i++) ((float*)slots[l].word[0])[i] = C[l / 4 + 8 * (i >> 1 & 1)][i / 4 * 8 + 2 * (l & 3) + (i & 1)];
  exchange(mine);
}

// --- mbarriers and what they count ---
struct Load { u32 to; TensorMap map; int where[4]; const void* from; u32 bytes; };
struct Mbarrier { u32 phase = 0; int count = 0, left = 0; long bytes = 0; std::vector<Load> loads; };
static std::map<u32, Mbarrier> mbarriers;

void reset_block() { mbarriers.clear(); }
static Mbarrier& found(u32 address) {
  at(address, 8);
  const auto one = mbarriers.find(address);
  if (one == mbarriers.end()) fail("the mbarrier at %u was never set up", address);
  return one->second;
}
static void turn(Mbarrier& b) { if (b.left == 0 && b.bytes == 0) { b.phase++; b.left = b.count; } }
void barrier_init(u32 address, u32 count) {
  at(address, 8);
  Mbarrier& b = mbarriers[address] = Mbarrier();
  b.count = b.left = (int)count;
}
void barrier_arrive(u32 address, u32 bytes) {
  Mbarrier& b = found(address);
  b.bytes += bytes;
  if (--b.left < 0) fail("more arrivals at the mbarrier at %u than it counts", address);
  turn(b);
}
template <class Move> static u32 each_element(u32 tile, const TensorMap& m, const int* where, Move move) {
  if (tile % 1024) fail("the tile at %u is not aligned to 1024 bytes", tile);
  u32 offset = 0, i[4];
  for (u32 n = 0, total = m.box[0] * m.box[1] * m.box[2] * m.box[3]; n < total; n++) {
    u32 rest = n;
    for (int k = 0; k < 4; k++) { i[k] = rest % m.box[k]; rest /= m.box[k]; }
    u64 from = m.base;
    bool inside = true;
    for (int k = 0; k < 4; k++) {
      const long x = (long)where[k] + (long)i[k];
      inside = inside && x >= 0 && (u64)x < m.extent[k];
      from += (u64)x * m.stride[k];
    }
    u32 a = tile + offset;
    a ^= ((a >> 7) & 7) << 4;
    move(at(a, m.element), (char*)from, inside);
    offset += m.element;
  }
  return offset;
}
static void land(Mbarrier& b) {
  std::vector<Load> loads;
  loads.swap(b.loads);
  for (const Load& l : loads) {
    if (l.from) memcpy(at(l.to, 16), l.from, l.bytes);
    else each_element(l.to, l.map, l.where, [&](char* to, char* from, bool inside) {
      if (inside) memcpy(to, from, l.map.element); else memset(to, 0, l.map.element);
    });
    b.bytes -= l.bytes;
  }
  if (!loads.empty()) turn(b);
}
void barrier_wait(u32 address, u32 parity) {
  for (;;) {
    Mbarrier& b = found(address);
    land(b);
    if ((b.phase & 1) != parity) return;
    yield();
  }
}
void tensor_load(u32 to, const TensorMap& map, u32 barrier, const int* where) {
  if (to % 1024) fail("the tile at %u is not aligned to 1024 bytes", to);
  const u32 bytes = map.element * map.box[0] * map.box[1] * map.box[2] * map.box[3];
  found(barrier).loads.push_back({to, map, {where[0], where[1], where[2], where[3]}, nullptr, bytes});
}
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 || (u64)from % 16 || bytes % 16) fail("a bulk copy of %u bytes from %p to %u is not aligned to 16", bytes, from, to);
  if (bytes) at(to + bytes - 16, 16);
  found(barrier).loads.push_back({to, TensorMap(), {0, 0, 0, 0}, from, bytes});
}
}  // namespace emulator
