// Vectors of VW floats in the compiler's own notation, so that every kernel is written once. Included inside the
// namespace of an instruction set, which has defined VW; the compiler chooses the instructions.
typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef int8_t vb __attribute__((vector_size(VW)));
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))

constexpr float INF = __builtin_inff();

template <class V, class T>
INLINE V load(const T *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
INLINE void store(T *p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
INLINE vf set1(float x) { return vf{} + x; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf as_f(vu x) { return (vf)x; }
INLINE vu as_u(vf x) { return (vu)x; }

INLINE vf widen(vh x) { return as_f(__builtin_convertvector(x, vu) << 16); }
// To the nearest bf16, ties to even; a NaN stays one.
INLINE vh narrow(vf x) {
  const vu u = as_u(x);
  const vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const vu quiet = (u >> 16) | 0x40;
  return __builtin_convertvector((vu)(x == x) ? rounded : quiet, vh);
}
// The same where what is smaller than the least normal number may become 0.
INLINE vh narrow_normal(vf x) {
#if DOT_BF16
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  return narrow(x);
#endif
}
INLINE float widen1(bf16 x) {
  const uint32_t u = (uint32_t)x << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
INLINE bf16 narrow1(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return x == x ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40;
}

// VW numbers of any type as floats, and back. The second form is for the last few of a row.
INLINE vf get(const float *p) { return load<vf>(p); }
INLINE vf get(const bf16 *p) { return widen(load<vh>(p)); }
INLINE vf get(const int8_t *p) { return __builtin_convertvector(load<vb>(p), vf); }
INLINE void put(float *p, vf x) { store(p, x); }
INLINE void put(bf16 *p, vf x) { store(p, narrow(x)); }
INLINE float get1(const float *p) { return *p; }
INLINE float get1(const bf16 *p) { return widen1(*p); }
INLINE void put1(float *p, float x) { *p = x; }
INLINE void put1(bf16 *p, float x) { *p = narrow1(x); }
template <class T>
INLINE vf get(const T *p, int64_t n) {
  vf x{};
  for (int i = 0; i < VW; ++i)
    if (i < n) x[i] = get1(p + i);
  return x;
}
template <class T>
INLINE void put(T *p, vf x, int64_t n) {
  for (int i = 0; i < VW; ++i)
    if (i < n) put1(p + i, x[i]);
}

// All lanes as one by `join`, halves with halves, so that a sum does not depend on the instruction set's way of adding them.
template <int HALF, class V, class Join>
INLINE V join_halves(V x, Join join) {
  vi other{};
#pragma GCC unroll 16
  for (int i = 0; i < VW; ++i) other[i] = (i + HALF) % VW;
  x = join(x, __builtin_shuffle(x, other));
  if constexpr (HALF > 1) return join_halves<HALF / 2>(x, join);
  return x;
}
INLINE float sum_lanes(vf x) {
  return join_halves<VW / 2>(x, [&](vf a, vf b) { return a + b; })[0];
}
INLINE int32_t sum_lanes(vi x) {
  return join_halves<VW / 2>(x, [&](vi a, vi b) { return a + b; })[0];
}
INLINE float max_lanes(vf x) {
  return join_halves<VW / 2>(x, [&](vf a, vf b) { return vmax(a, b); })[0];
}

// e to the x for x <= 88, within 2 units in the last place; 0 or less than the least normal number below -87.3; NaN for NaN.
// Cody and Waite's reduction to |r| <= ln(2) / 2 and the polynomial of Cephes' expf.
INLINE vf vexp(vf x) {
#if VW == 16 && DOT_INT8
  x = (vf)_mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x);  // the second if one is NaN; e to the -104 is 0
#endif
  const vf n_magic = x * 1.44269504f + 12582912.0f;  // rounds to a whole number in the low bits of the mantissa
  const vf n = n_magic - 12582912.0f;
  const vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = set1(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
#if VW == 16 && DOT_INT8
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const vu scale = (as_u(n_magic) - as_u(set1(12582912.0f))) << 23;
  const vf e = as_f(as_u(p) + scale);
  return x < -87.3f ? vf{} : (x == x ? e : x);
#endif
}
INLINE float exp1(float x) { return vexp(set1(x))[0]; }
