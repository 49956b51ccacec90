// Attention on Hopper (sm_90a): the kernels. Blocks of 128 threads, one for each tile of 64 positions of each head.
#include "attention_hopper.cuh"
constexpr int BLOCKS = HEAD_DIM == 64 ? 3 : 2;  // on one multiprocessor, as shared memory and registers allow
KERNEL __launch_bounds__(128, HEAD_DIM == 64 ? 4 : 2)
attention(TMAP mq, store_t* o, float* lse, const param_t* bias, int T, int H, float scale) {
  attn_fwd(mq, o, lse, bias, T, H, scale, SHARED);
}
EXPORT(attention)
KERNEL __launch_bounds__(128, BLOCKS)
attention_dq(TMAP mq, TMAP mg, const store_t* o, const store_t* dout, const param_t* bias, const float* lse, float* delta,
    const float2* turns, store_t* dqkv, float* parts, int T, int H, float scale) {
  attn_dq(mq, mg, o, dout, bias, lse, delta, turns, dqkv, parts, T, H, scale, SHARED);
}
EXPORT(attention_dq)
KERNEL __launch_bounds__(128, BLOCKS)
attention_dkv(TMAP mq, TMAP mg, const float* lse, const float* delta, const float2* turns, store_t* dqkv, float* parts,
    int T, int H, float scale) {
  attn_dkv(mq, mg, lse, delta, turns, dqkv, parts, T, H, scale, SHARED);
}
EXPORT(attention_dkv)
