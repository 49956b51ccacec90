// What a kernel compiled for the CPU asks of the machine that runs it: threads of a block as fibers, barriers, shared memory, matrix units.
// One OS thread runs one block after the other, and each thread of the block until it waits: no data race can hide behind luck, and a
// second run in the reverse order of threads and blocks shows whether anything depends on that order.
#pragma once
#include <stddef.h>
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

namespace emulator {
struct Dim { unsigned x, y, z; };
struct Barrier { int arrived; unsigned generation; };
struct Slot { u64 word[4]; };  // what one lane brings to an exchange
struct Copy { u32 to; const void* from; int bytes; bool ok; unsigned group; };
struct Warp { Barrier barrier; int alive; Slot slots[2][32]; };
struct Fiber {
  void* sp; char* stack; Fiber* next; Fiber* previous;
  Dim thread; int lane; Warp* warp;
  Copy copies[512]; int first, count; unsigned committed;  // cp.async: lands only when waited for
};
// How a kernel is called: `run` is one thread of it; its static shared memory is [low, high).
struct Call { const char* name; void (*run)(); char* low; char* high; };
struct Launch { int blocks_x, blocks_y, threads, shared, reverse; };

extern Fiber* self;
extern Dim block, blocks, threads;
extern char shared[];

int launch(const Call& call, const Launch& how, char* message, int room);
[[noreturn]] void fail(const char* format, ...);
void yield();                                // let the others run; fails when nobody gets any further
void arrive(Barrier& barrier, int total);    // and wait for the others
void sync_block();
Slot* exchange(const Slot& mine);            // a warp's slots, once all its lanes have brought theirs
u32 address_of(const void* pointer);         // as the shared window counts
char* at(u32 address, int bytes);            // checked for bounds and alignment
void check_mask(u32 mask);

void copy_async(u32 to, const void* from, int bytes, bool ok);
void commit_copies();
void wait_copies(unsigned pending);
void load_matrices(u32* into, u32 address, bool transposed);
void multiply_warp(float* c, const u32* a, u32 b0, u32 b1, bool bfloat);
// D [64, n] (+)= A B over 16 columns of A; a group of four warps; `a` null: A comes from registers
void multiply_group(float* d, const u64* a, const u32* registers, u64 b, int n, bool transpose_a, bool transpose_b, bool add, bool bfloat);

// A tensor map as the emulated device makes it (128 bytes, as the hardware's).
struct TensorMap { u64 base, extent[4], stride[4]; u32 box[4], element, pad[9]; };
void barrier_init(u32 address, u32 count);
void barrier_arrive(u32 address, u32 bytes);
void barrier_wait(u32 address, u32 parity);
void tensor_load(u32 to, const TensorMap& map, u32 barrier, const int* where);
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier);
void reset_block();                          // barriers and loads of the block before
}  // namespace emulator
