// Attention with mma.sync (sm_80 and later): the kernels. Blocks of 128 threads, one for each tile of 64 positions of each head.
#include "attention_mma.cuh"
constexpr int BLOCKS = HEAD_DIM <= 64 ? 3 : 2;  // on one multiprocessor, as registers allow
KERNEL __launch_bounds__(128, HEAD_DIM <= 96 ? 3 : 2)
attention(const store_t* qkv, store_t* o, float* lse, const param_t* bias, int T, int H, float scale) {
  attn_fwd(qkv, o, lse, bias, T, H, scale, SHARED);
}
EXPORT(attention)
KERNEL __launch_bounds__(128, BLOCKS)
attention_dq(const store_t* qkv, const store_t* o, const store_t* dout, const param_t* bias, const float* lse, float* delta,
    const float2* turns, store_t* dqkv, float* parts, int T, int H, float scale) {
  attn_dq(qkv, o, dout, bias, lse, delta, turns, dqkv, parts, T, H, scale, SHARED);
}
EXPORT(attention_dq)
KERNEL __launch_bounds__(128, BLOCKS)
attention_dkv(const store_t* qkv, const store_t* dout, const float* lse, const float* delta, const float2* turns,
    store_t* dqkv, float* parts, int T, int H, float scale) {
  attn_dkv(qkv, dout, lse, delta, turns, dqkv, parts, T, H, scale, SHARED);
}
EXPORT(attention_dkv)
