// What the attention kernels share: the arrays, which tile a block has, the bias of v.
//
// HEAD_DIM, CAUSAL (0, 1), STORAGE (of the activations) and PARAMETER (of the bias) are chosen at compilation.
// qkv [B, T, 3, H, HEAD_DIM] holds q and k with bias and rotation, v without its bias: it joins o here, because the weights of a row
// sum to 1, and leaves delta again. o and dO are [B, T, H, HEAD_DIM]. lse and delta are float32 [B * H, Tp], Tp being T rounded up to
// 64; lse is log2(sum exp2(scale * log2(e) * q k)), delta is rowsum(dO * (o - bias of v)). turns [>= Tp, HEAD_DIM / 2] holds (cos, sin),
// or is null. parts [B * blocks of a head, 3, H, HEAD_DIM] gets the column sums of each block's gradient, or is null.
#pragma once
#define GROUP 1
#include "group.cuh"
DI float bias_at(const param_t* p, int i) { float f; load_parameters(p + i, &f); return f; }
#define LOG2E 1.4426950408889634f

// Block -> tile of positions; tiles of a head next to each other. Causal forward and dQ take the longest rows first.
struct Place { int tiles, tile, bh, b, h; };
DI Place place(int tiles, int H, bool longest_first) {
  Place p;
  p.tiles = tiles;
  p.bh = blockIdx.x / tiles;
  p.tile = blockIdx.x - p.bh * tiles;
  if (longest_first) p.tile = tiles - 1 - p.tile;
  p.b = p.bh / H;
  p.h = p.bh - p.b * H;
  return p;
}
