// Products of int8 inputs with int8 or 4-bit weights, summed exactly, so that every instruction set gives the same
// integers. A word is four weights of one output, or four inputs; a lane of `vi` sums what belongs to one output.
//
// int8 weights are in -127..127 or -128, inputs in -127..127. AVX2's u8 x s8 product adds pairs into 16 bits and clips;
// with |weight| <= 128 and |input| <= 127 a pair has at most 32,512, so nothing is ever clipped. VNNI's does not clip.

// 128 where weights are made unsigned by adding it: the caller takes INT8_OFFSET times the sum of the inputs off.
#if DOT_INT8 == 3 || defined(PM_EMULATE_DOT)
constexpr int INT8_OFFSET = 128;
#else
constexpr int INT8_OFFSET = 0;
#endif

typedef int16_t vs __attribute__((vector_size(VW * 4)));  // two per word
INLINE vs even_bytes(vu x) { return (vs)((vs)x << 8) >> 8; }
INLINE vs odd_bytes(vu x) { return (vs)x >> 8; }
INLINE vi fold(vs x) { return ((vi)((vu)x << 16) >> 16) + ((vi)x >> 16); }

#if DOT_INT8 == 3
struct Int8Weights {
  vu biased;
};
INLINE Int8Weights int8_weights(vu w) { return {w ^ 0x80808080u}; }
INLINE vi dot_int8(vi sum, Int8Weights w, vu x) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.biased, (__m512i)x);
}
typedef vi NibbleSum;
INLINE NibbleSum dot_nibbles(NibbleSum sum, vu w, vu x) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
INLINE vi total(NibbleSum sum) { return sum; }

#elif DOT_INT8 == 2
struct Int8Weights {
  __m512i magnitude;
  __mmask64 negative;
};
INLINE Int8Weights int8_weights(vu w) { return {_mm512_abs_epi8((__m512i)w), _mm512_movepi8_mask((__m512i)w)}; }
INLINE vi dot_int8(vi sum, Int8Weights w, vu x) {
  const __m512i signed_x = _mm512_mask_sub_epi8((__m512i)x, w.negative, _mm512_setzero_si512(), (__m512i)x);
  return sum + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w.magnitude, signed_x), _mm512_set1_epi16(1));
}
typedef vs NibbleSum;
INLINE NibbleSum dot_nibbles(NibbleSum sum, vu w, vu x) {
  return sum + (vs)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
}
INLINE vi total(NibbleSum sum) { return (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }

#elif DOT_INT8 == 1
struct Int8Weights {
  __m256i magnitude, w;
};
INLINE Int8Weights int8_weights(vu w) { return {_mm256_abs_epi8((__m256i)w), (__m256i)w}; }
INLINE vi dot_int8(vi sum, Int8Weights w, vu x) {
  const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8((__m256i)x, w.w));
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
typedef vs NibbleSum;
INLINE NibbleSum dot_nibbles(NibbleSum sum, vu w, vu x) {
  return sum + (vs)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
}
INLINE vi total(NibbleSum sum) { return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }

#else
struct Int8Weights {
  vs even, odd;
};
#if defined(PM_EMULATE_DOT)  // for tests on CPUs without VNNI: weights with the offset, and pairs beyond 16 bits
INLINE Int8Weights int8_weights(vu w) {
  const vu biased = w ^ 0x80808080u;
  return {(vs)(biased & 0x00ff00ffu), (vs)(biased >> 8 & 0x00ff00ffu)};
}
INLINE vi dot_int8(vi sum, Int8Weights w, vu x) {
  return sum + fold(w.even * even_bytes(x)) + fold(w.odd * odd_bytes(x));
}
#else
INLINE Int8Weights int8_weights(vu w) { return {even_bytes(w), odd_bytes(w)}; }
INLINE vi dot_int8(vi sum, Int8Weights w, vu x) { return sum + fold(w.even * even_bytes(x) + w.odd * odd_bytes(x)); }
#endif
typedef vs NibbleSum;
INLINE NibbleSum dot_nibbles(NibbleSum sum, vu w, vu x) {
  return sum + (even_bytes(w) * even_bytes(x) + odd_bytes(w) * odd_bytes(x));
}
INLINE vi total(NibbleSum sum) { return fold(sum); }
#endif
// Eight words of weights in 0..15 fit a NibbleSum: 8 pairs of at most 2 x 15 x 127 are 30,480.

INLINE vu spread_word(const int8_t *x) {
  uint32_t word;
  __builtin_memcpy(&word, x, 4);
  return vu{} + word;
}

// VW half precision numbers as floats; no infinities, no NaN.
INLINE vf get_half(const uint16_t *p) {
#if VW == 16 && DOT_INT8
  return (vf)_mm512_cvtph_ps((__m256i)load<vh>(p));
#elif VW == 8 && DOT_INT8
  return (vf)_mm256_cvtph_ps((__m128i)load<vh>(p));
#else
  const vu bits = __builtin_convertvector(load<vh>(p), vu);
  return as_f(as_u(as_f((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}
