// The end of a step over all parameters in four launches: measure pieces, fold parameters, decide, update.
// Parameters are cut into pieces of PIECE elements, so that large and small ones balance; a block does one piece.
// Rule 1: the updates round as NumPy does: every operation once, none fused into another.
// Rule 2: sums of squares are float64 in a fixed order: threads, warps, pieces, parameters, nodes.
// Rule 3: a skipped step writes no parameter, moment or copy.
#include "double.cuh"
#define PIECE 4096
#define EACH (PIECE / 4 / 256)  // vectors a thread

struct Piece {
  float* master; float* gradient; void* low; float* m; float* v;
  u64 start;               // where it begins in its parameter
  u32 size, parameter;
  u32 addend; u16 addends; // those of its parameter: addend, addend + 1, …
  unsigned char low_kind;  // 0 none, or as STORAGE
  unsigned char aligned;   // all of its arrays are, to four elements
};

// --- measure -----------------------------------------------------------------------------------------------------------------------

// gradient += each addend (other shards, tied accumulators), in order; squares[piece] = the sum of its squares
KERNEL __launch_bounds__(256, 5) measure(const Piece* pieces, const float* const* addends, double* squares) {
  __shared__ double sums[8];
  const Piece p = pieces[blockIdx.x];
  const int tid = threadIdx.x, vectors = p.aligned ? p.size / 4 : 0;
  double s = 0;
  V4 g[EACH];
#pragma unroll
  for (int k = 0; k < EACH; k++) if (tid + 256 * k < vectors) g[k] = ldg16(p.gradient + 4 * (tid + 256 * k));
  for (u32 a = p.addend; a < p.addend + p.addends; a++) {
#pragma unroll
    for (int k = 0; k < EACH; k++) if (tid + 256 * k < vectors) {
      const V4 t = ldg16(addends[a] + p.start + 4 * (tid + 256 * k));
      g[k].x = float_bits(bits_float(g[k].x) + bits_float(t.x)); g[k].y = float_bits(bits_float(g[k].y) + bits_float(t.y));
      g[k].z = float_bits(bits_float(g[k].z) + bits_float(t.z)); g[k].w = float_bits(bits_float(g[k].w) + bits_float(t.w));
    }
  }
#pragma unroll
  for (int k = 0; k < EACH; k++) if (tid + 256 * k < vectors) {
    if (p.addends) stg16(p.gradient + 4 * (tid + 256 * k), g[k]);
    const double x = bits_float(g[k].x), y = bits_float(g[k].y), z = bits_float(g[k].z), w = bits_float(g[k].w);
    s += x * x; s += y * y; s += z * z; s += w * w;  // the square of a float is exact in float64
  }
  for (int i = 4 * vectors + tid; i < (int)p.size; i += 256) {
    float x = p.gradient[i];
    for (u32 a = p.addend; a < p.addend + p.addends; a++) x += addends[a][p.start + i];
    if (p.addends) p.gradient[i] = x;
    s += (double)x * x;
  }
  s = block_sum<8>(s, sums);
  if (tid == 0) squares[blockIdx.x] = s;
}
EXPORT(measure)

// squares[parameter] = the sum over its pieces, first[parameter] up to first[parameter + 1]
KERNEL __launch_bounds__(256) fold(const double* of_pieces, const int* first, double* squares) {
  __shared__ double sums[8];
  double s = 0;
#pragma unroll 4
  for (int i = first[blockIdx.x] + threadIdx.x; i < first[blockIdx.x + 1]; i += 256) s += of_pieces[i];
  s = block_sum<8>(s, sums);
  if (threadIdx.x == 0) squares[blockIdx.x] = s;
}
EXPORT(fold)

DI bool is_finite(double x) { return x <= 1.7976931348623157e308 && x >= -1.7976931348623157e308; }

// flag = 1 if all squares are finite, else 0: squares of finite floats cannot overflow a float64. One block.
KERNEL __launch_bounds__(256) all_finite(const double* squares, double* flag, int P) {
  __shared__ double sums[8];
  double bad = 0;
  for (int i = threadIdx.x; i < P; i += 256) bad += is_finite(squares[i]) ? 0 : 1;
  bad = block_sum<8>(bad, sums);
  if (threadIdx.x == 0) *flag = bad == 0 ? 1 : 0;
}
EXPORT(all_finite)

// --- decide ------------------------------------------------------------------------------------------------------------------------

struct Scaler { double updates, loss_scale, good_steps, dynamic, window, min_scale, max_scale; };
struct Decision { int candidate; float grad_factor; };  // candidate -1: skip
struct Report { double updates, loss_scale, good_steps, skipped, norm, loss_scale_before; };

// `optim.decide.decide` to the bit. One block. squares [P] of the parameters; node n has those from first[n] up to first[n + 1].
// If this step, were it applied, would be none of the candidates, nothing is done and the report says NaN updates.
KERNEL __launch_bounds__(256) decide(const double* squares, const int* first, int nodes, Scaler* scaler, double clip_norm, double first_update,
                                    int candidates, Decision* decision, float* loss_scale, Report* report) {
  __shared__ double of_nodes[256];
  double total = 0;
  for (int n0 = 0; n0 < nodes; n0 += 256) {
    const int n = n0 + threadIdx.x;
    double s = 0;
    if (n < nodes) for (int i = first[n]; i < first[n + 1]; i++) s += squares[i];
    of_nodes[threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.x == 0) for (int i = 0; i < min(256, nodes - n0); i++) total += of_nodes[i];
    __syncthreads();
  }
  if (threadIdx.x) return;
  Scaler now = *scaler;
  Report r;
  r.loss_scale_before = now.loss_scale;
  r.norm = is_finite(total) ? sqrt(total) / now.loss_scale : (double)INF;
  const bool apply = is_finite(r.norm);
  const double candidate = now.updates + 1 - first_update;
  const bool known = candidate >= 0 && candidate < candidates;
  decision->candidate = apply && known ? (int)candidate : -1;
  if (apply) {
    const double clip = clip_norm != 0 ? min(1.0, clip_norm / (r.norm + 1e-6)) : 1.0;
    decision->grad_factor = (float)(clip / now.loss_scale);
    if (known) {
      now.updates += 1;
      now.good_steps += 1;
      if (now.dynamic != 0 && now.good_steps >= now.window) {
        now.loss_scale = min(now.max_scale, now.loss_scale * 2);
        now.good_steps = 0;
      }
    }
  } else {
    decision->grad_factor = 0.f;
    if (now.dynamic != 0) now.loss_scale = max(now.min_scale, now.loss_scale / 2);
    now.good_steps = 0;
  }
  *scaler = now;
  *loss_scale = (float)now.loss_scale;
  r.updates = apply && !known ? (double)(INF - INF) : now.updates;
  r.loss_scale = now.loss_scale;
  r.good_steps = now.good_steps;
  r.skipped = apply ? 0 : 1;
  *report = r;
}
EXPORT(decide)

// --- update ------------------------------------------------------------------------------------------------------------------------

struct Step {  // one AdamStep or SgdStep, in the numbers that kernels multiply by; 1 - x and the like are taken in float64 before
  u32 adam;
  float grad_factor, lr, weight_decay;        // SGD: lr, momentum (beta1), weight_decay
  float beta1, rest1, beta2, rest2;           // rest = 1 - beta
  float correction1, correction2, eps, keep;  // keep = 1 - lr * weight_decay
};

DI void adam(const Step& s, float g, float& w, float& m, float& v) {
  g = __fmul_rn(g, s.grad_factor);
  m = __fadd_rn(__fmul_rn(s.beta1, m), __fmul_rn(s.rest1, g));
  v = __fadd_rn(__fmul_rn(s.beta2, v), __fmul_rn(__fmul_rn(s.rest2, g), g));
  const float speed = __fmul_rn(s.lr, __fdiv_rn(m, s.correction1));
  const float size = __fadd_rn(__fsqrt_rn(__fdiv_rn(v, s.correction2)), s.eps);
  w = __fadd_rn(__fmul_rn(w, s.keep), -__fdiv_rn(speed, size));
}
DI void sgd(const Step& s, float g, float& w, float& m, bool momentum) {
  g = __fmul_rn(g, s.grad_factor);
  if (momentum) g = m = __fadd_rn(__fmul_rn(s.beta1, m), g);
  w = __fadd_rn(w, -__fmul_rn(s.lr, __fadd_rn(g, __fmul_rn(s.weight_decay, w))));
}
// Compiled with STORAGE 2: pack2 makes bfloat16, pack_half2 float16.
DI u32 pack_low(int kind, float a, float b) { return kind == 2 ? pack2(a, b) : pack_half2(a, b); }
struct alignas(8) V2 { u32 x, y; };
DI void store4_low(const Piece& p, int i, const float* w) {
  if (p.low_kind == 3) {
    store4f((float*)p.low + 4 * i, w);
  } else if (p.low_kind) {
    V2 half;
    half.x = pack_low(p.low_kind, w[0], w[1]); half.y = pack_low(p.low_kind, w[2], w[3]);
    ((V2*)p.low)[i] = half;
  }
}
DI void store1_low(const Piece& p, int i, float w) {
  if (p.low_kind == 3) ((float*)p.low)[i] = w;
  else if (p.low_kind) ((u16*)p.low)[i] = (u16)pack_low(p.low_kind, w, 0.f);
}

template <bool ADAM> DI void update1(const Step& s, float g, float& w, float& m, float& v, bool momentum) {
  if (ADAM) adam(s, g, w, m, v);
  else sgd(s, g, w, m, momentum);
}
template <bool ADAM> DI void update_piece(const Piece& p, const Step& s) {
  const int tid = threadIdx.x, vectors = p.aligned ? p.size / 4 : 0;
  const bool momentum = ADAM || p.m;
  for (int i = tid; i < vectors; i += 256) {
    float g[4], w[4], m[4] = {}, v[4] = {};
    load4f(p.gradient + 4 * i, g);
    load4f(p.master + 4 * i, w);
    if (momentum) load4f(p.m + 4 * i, m);
    if (ADAM) load4f(p.v + 4 * i, v);
#pragma unroll
    for (int e = 0; e < 4; e++) update1<ADAM>(s, g[e], w[e], m[e], v[e], momentum);
    store4f(p.master + 4 * i, w);
    if (momentum) store4f(p.m + 4 * i, m);
    if (ADAM) store4f(p.v + 4 * i, v);
    store4_low(p, i, w);
  }
  for (int i = 4 * vectors + tid; i < (int)p.size; i += 256) {
    float w = p.master[i], m = momentum ? p.m[i] : 0.f, v = ADAM ? p.v[i] : 0.f;
    update1<ADAM>(s, p.gradient[i], w, m, v, momentum);
    p.master[i] = w;
    if (momentum) p.m[i] = m;
    if (ADAM) p.v[i] = v;
    store1_low(p, i, w);
  }
}

// steps[candidate][groups of parameters with the same numbers]; group[parameter]. Without a decision: candidate 0, with its own factor.
KERNEL __launch_bounds__(256, 4) update(const Piece* pieces, const Step* steps, const u32* group, int groups, const Decision* decision) {
  const int candidate = decision ? decision->candidate : 0;
  if (candidate < 0) return;
  const Piece p = pieces[blockIdx.x];
  Step s = steps[candidate * groups + group[p.parameter]];
  if (decision) s.grad_factor = decision->grad_factor;
  if (s.adam) update_piece<true>(p, s);
  else update_piece<false>(p, s);
}
EXPORT(update)
