// Fibers: a block's threads take turns on one OS thread. See runtime.h.
#include "runtime.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(PORTABLE_FIBERS)
#include <ucontext.h>
#endif

namespace emulator {
static const int MAX_THREADS = 1024, MAX_SHARED = 232448, GUARD = 1024, STACK = 1 << 16;
static const u32 STATIC_WINDOW = 1u << 20;  // where static shared memory begins, as addresses count
static const u64 CANARY = 0x5ca1ab1e0ddba11ull;

Fiber* self;
Dim block, blocks, threads;
alignas(1024) char shared[MAX_SHARED + GUARD];
static Fiber fibers[MAX_THREADS];
static Warp warps[MAX_THREADS / 32];
static Barrier block_barrier;
static int alive, idle, shared_bytes;
static bool failed;
static const Call* running;
static char reason[512];

// --- switching: callee-saved registers go onto the stack that is left ---
static void* main_sp;
static void enter();
#if defined(__x86_64__) && !defined(PORTABLE_FIBERS)
extern "C" void emulator_switch(void** left, void* entered);
asm(R"(
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
static void prepare(Fiber& f) {
  void** top = (void**)(f.stack + STACK) - 2;
  *top = (void*)&enter;  // where `ret` goes, with the stack aligned as after a call
  f.sp = top - 6;
}
static void change(void** left, void* entered) { emulator_switch(left, entered); }
#else
static ucontext_t contexts[MAX_THREADS + 1];
static void prepare(Fiber& f) {
  ucontext_t& c = contexts[&f - fibers];
  getcontext(&c);
  c.uc_stack.ss_sp = f.stack + 64; c.uc_stack.ss_size = STACK - 64; c.uc_link = nullptr;
  makecontext(&c, enter, 0);
  f.sp = &c;
}
static void change(void** left, void* entered) {
  if (left == &main_sp) *left = &contexts[MAX_THREADS];
  swapcontext((ucontext_t*)*left, (ucontext_t*)entered);
}
#endif

static void release(Barrier& b) { b.arrived = 0; b.generation++; idle = 0; }
static void enter() {
  running->run();
  Fiber* mine = self;
  if (*(u64*)mine->stack != CANARY) fail("a thread needs more stack than %d bytes", STACK);
  idle = 0;
  Warp& w = *mine->warp;
  if (--w.alive > 0 && w.barrier.arrived == w.alive) release(w.barrier);  // threads that are gone are not waited for
  if (--alive > 0 && block_barrier.arrived == alive) release(block_barrier);
  mine->previous->next = mine->next; mine->next->previous = mine->previous;
  if (alive > 0) self = mine->next;
  change(&mine->sp, alive > 0 ? self->sp : main_sp);  // and never back
}
void yield() {
  if (++idle > 2 * alive + 2) fail("deadlock: %d threads wait for something that never comes", alive);
  Fiber* mine = self;
  if (mine->next == mine) return;
  self = mine->next;
  change(&mine->sp, self->sp);
}
void fail(const char* format, ...) {
  int n = snprintf(reason, sizeof reason, "%s, block (%u, %u), thread %u: ", running->name, block.x, block.y, self->thread.x);
  va_list rest;
  va_start(rest, format);
  vsnprintf(reason + n, sizeof reason - n, format, rest);
  va_end(rest);
  failed = true;
  change(&self->sp, main_sp);
  abort();
}

// --- barriers ---
void arrive(Barrier& b, int total) {
  idle = 0;
  if (++b.arrived >= total) return release(b);
  const unsigned g = b.generation;
  do yield(); while (b.generation == g);
}
void sync_block() { arrive(block_barrier, alive); }
Slot* exchange(const Slot& mine) {
  Warp& w = *self->warp;
  Slot* slots = w.slots[w.barrier.generation & 1];  // alternating, so that reading needs no second barrier
  slots[self->lane] = mine;
  arrive(w.barrier, w.alive);
  return slots;
}
void check_mask(u32 mask) { if (mask != 0xffffffffu) fail("only whole warps take part in an exchange, mask %08x", mask); }

// --- shared memory: one window, dynamic at 0, static behind it ---
u32 address_of(const void* pointer) {
  const char* p = (const char*)pointer;
  if (p >= shared && p <= shared + shared_bytes) return (u32)(p - shared);
  if (p >= running->low && p < running->high) return STATIC_WINDOW + (u32)(p - running->low);
  fail("%p is not in shared memory", pointer);
}
char* at(u32 a, int bytes) {
  if (a % (bytes < 16 ? bytes : 16)) fail("shared address %u is not aligned to %d bytes", a, bytes);
  if (a >= STATIC_WINDOW && a - STATIC_WINDOW + bytes <= (u64)(running->high - running->low)) return running->low + (a - STATIC_WINDOW);
  if (a + (u64)bytes > (u64)shared_bytes) fail("%d bytes at shared address %u lie outside the %d of this launch", bytes, a, shared_bytes);
  return shared + a;
}

// --- launches ---
static void start_block(int threads_, bool reverse) {
  memset(shared, 0xff, shared_bytes + GUARD);
  if (running->high > running->low) memset(running->low, 0xff, running->high - running->low);
  reset_block();
  memset(&block_barrier, 0, sizeof block_barrier);
  for (int i = 0; i < (threads_ + 31) / 32; i++) { warps[i].barrier = Barrier(); warps[i].alive = 0; }
  for (int i = 0; i < threads_; i++) {
    Fiber& f = fibers[i];
    f.thread = {(unsigned)i, 0, 0}; f.lane = i & 31; f.warp = &warps[i >> 5]; f.warp->alive++;
    f.first = f.count = 0; f.committed = 0;
    f.next = &fibers[(i + (reverse ? threads_ - 1 : 1)) % threads_];
    f.previous = &fibers[(i + (reverse ? 1 : threads_ - 1)) % threads_];
    prepare(f);
  }
  alive = threads_; idle = 0;
  self = &fibers[reverse ? threads_ - 1 : 0];
}
static void check_guard() {
  for (int i = 0; i < GUARD; i++) if ((unsigned char)shared[shared_bytes + i] != 0xff) {
    const char* told = "%s, block (%u, %u): wrote behind the %d bytes of shared memory of this launch";
    snprintf(reason, sizeof reason, told, running->name, block.x, block.y, shared_bytes);
    failed = true;
    return;
  }
}
int launch(const Call& call, const Launch& how, char* message, int room) {
  running = &call; failed = false; shared_bytes = how.shared;
  blocks = {(unsigned)how.blocks_x, (unsigned)how.blocks_y, 1}; threads = {(unsigned)how.threads, 1, 1};
  if (!fibers[0].stack) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* stacks = (char*)mmap(nullptr, (size_t)MAX_THREADS * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stacks == MAP_FAILED) { snprintf(message, room, "no memory for the stacks of %d threads", MAX_THREADS); return 1; }
    for (int i = 0; i < MAX_THREADS; i++) fibers[i].stack = stacks + (size_t)i * STACK;
  }
  for (int i = 0; i < how.threads; i++) *(u64*)fibers[i].stack = CANARY;
  const long total = (long)how.blocks_x * how.blocks_y;
  for (long i = 0; i < total && !failed; i++) {
    const long b = how.reverse ? total - 1 - i : i;
    block = {(unsigned)(b % how.blocks_x), (unsigned)(b / how.blocks_x), 0};
    start_block(how.threads, how.reverse);
    change(&main_sp, self->sp);
    if (!failed) check_guard();
  }
  if (failed) snprintf(message, room, "%s", reason);
  return failed;
}
}  // namespace emulator
