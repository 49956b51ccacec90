// The exact GELU (erf). In 16-bit storage by minimax polynomials in x^2 (degree 12, fitted on |x| <= 5, constant beyond): 17 instructions
// and no special-function unit; |error| of gelu < 2e-6 + 1e-8 |x|, of its slope < 1.1e-5. In float32 storage by erff.
// What is not finite never becomes finite.
#pragma once
#include "device.cuh"
#if STORAGE == 3
DI float gelu(float x) { return x * (0.5f + 0.5f * erff(x * 0.70710678118654752f)); }
DI float gelu_slope(float x) {
  const float density = 0.39894228040143268f * ex2(-0.72134752044448170f * x * x);
  return 0.5f + 0.5f * erff(x * 0.70710678118654752f) + x * density;
}
#else
DI float gelu(float x) {  // x Phi(x)
  const float c = fminf(fmaxf(x, -5.f), 5.f), s = c * c * 0.08f - 1.f;
  float r = 0.000608687853f;
  r = r * s - 0.00161324017f; r = r * s + 0.00172290194f; r = r * s - 0.0026856342f; r = r * s + 0.00641041135f;
  r = r * s - 0.011164289f; r = r * s + 0.0164022181f; r = r * s - 0.0232686711f; r = r * s + 0.0314421637f;
  r = r * s - 0.0404426047f; r = r * s + 0.0515205229f; r = r * s - 0.0702962807f;
  r = r * s + 0.141363814f;  // so that Phi(5) is 1, and |Phi(-5)| < 1e-8: far below zero nothing leaks through
  return x * (c * r + 0.5f);
}
DI float gelu_slope(float x) {  // Phi(x) + x phi(x)
  const float c = fminf(fmaxf(x, -5.f), 5.f), s = c * c * 0.08f - 1.f;
  float r = 0.0102555227f;
  r = r * s - 0.0246610346f; r = r * s + 0.017727575f; r = r * s - 0.017874873f; r = r * s + 0.0513871262f;
  r = r * s - 0.0773041805f; r = r * s + 0.0806360966f; r = r * s - 0.0819142212f; r = r * s + 0.0802136449f;
  r = r * s - 0.072079061f; r = r * s + 0.0665815474f; r = r * s - 0.0750997923f; r = r * s + 0.142133657f;
  return c * r + 0.5f + 0.f * x;  // the last term: NaN where x is not finite
}
#endif
