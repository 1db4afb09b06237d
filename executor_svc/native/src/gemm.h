// Small matrix products over packed operands, and the packing. One "word" is what one multiply-add takes per lane: a
// float, or with DOT a pair of bf16 whose products are added in float.

template <bool DOT>
INLINE vf multiply_add(vf sum, vu a, vu b) {
#if DOT_BF16
  if constexpr (DOT) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(PM_EMULATE_DOT)  // for tests on CPUs without the instruction: what it computes, but for denormals
  if constexpr (DOT) {
    const vf high = as_f(a & 0xffff0000u) * as_f(b & 0xffff0000u);
    return as_f(a << 16) * as_f(b << 16) + (high + sum);
  }
#endif
  return as_f(a) * as_f(b) + sum;
}

// Sums of R rows and C vectors of columns stay in registers. A row's sums are added in the same order whatever R is.
template <bool DOT, int R, int C>
INLINE void gemm_block(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, float *c, int64_t ldc, int k) {
  vf sums[R][C] = {};
  for (int i = 0; i < k; ++i) {
    vu column[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) column[j] = load<vu>(b + i * ldb + j * VW);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vu row = vu{} + a[r * lda + i];
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sums[r][j] = multiply_add<DOT>(sums[r][j], row, column[j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) store(c + r * ldc + j * VW, sums[r][j]);
}

// Rows and vectors held at once: what the registers take (32 of them, or 16).
constexpr int GEMM_ROWS = VW == 4 ? 4 : 6;
constexpr int GEMM_VECTORS = VW == 16 ? 4 : 2;
constexpr int FEW_ROWS_VECTORS = VW == 16 ? 8 : 4;

template <bool DOT, int C>
INLINE void gemm_rows(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, float *c, int64_t ldc, int rows,
                      int k) {
  int r = 0;
  for (; r + GEMM_ROWS <= rows; r += GEMM_ROWS)
    gemm_block<DOT, GEMM_ROWS, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k);
  a += r * lda;
  c += r * ldc;
  switch (rows - r) {
    case 5: gemm_block<DOT, 5, C>(a, lda, b, ldb, c, ldc, k); break;
    case 4: gemm_block<DOT, 4, C>(a, lda, b, ldb, c, ldc, k); break;
    case 3: gemm_block<DOT, 3, C>(a, lda, b, ldb, c, ldc, k); break;
    case 2: gemm_block<DOT, 2, C>(a, lda, b, ldb, c, ldc, k); break;
    case 1: gemm_block<DOT, 1, C>(a, lda, b, ldb, c, ldc, k); break;
  }
}

// c (rows, n) = a (rows, k words) times b (k words, n); n is a multiple of 16. Columns outside, so that the panel of b
// stays in the first-level cache for all rows.
template <bool DOT>
static void gemm(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, float *c, int64_t ldc, int rows, int k,
                 int n) {
  constexpr int wide = FEW_ROWS_VECTORS * VW;
  int j = 0;
  if (rows <= 3)  // few rows: more columns, or the multipliers wait for their own sums
    for (; j + wide <= n; j += wide) gemm_rows<DOT, FEW_ROWS_VECTORS>(a, lda, b + j, ldb, c + j, ldc, rows, k);
  for (; j + GEMM_VECTORS * VW <= n; j += GEMM_VECTORS * VW)
    gemm_rows<DOT, GEMM_VECTORS>(a, lda, b + j, ldb, c + j, ldc, rows, k);
  for (; j < n; j += VW) gemm_rows<DOT, 1>(a, lda, b + j, ldb, c + j, ldc, rows, k);
}

// even[0], odd[0], even[1], ... to 2 * VW words.
typedef uint16_t vhh __attribute__((vector_size(VW * 4)));
INLINE void interleave(vhh even, vhh odd, uint32_t *to) {
  vhh low, high;
#pragma GCC unroll 32
  for (int i = 0; i < 2 * VW; ++i) {
    low[i] = i / 2 + i % 2 * 2 * VW;
    high[i] = low[i] + VW;
  }
  store(to, __builtin_shuffle(even, odd, low));
  store(to + VW, __builtin_shuffle(even, odd, high));
}

#if VW == 16
// Pairs of lanes of B words each of a and b change places, as in the transposition of a 2 x 2 matrix of such lanes.
template <int B>
INLINE void exchange(vu &a, vu &b) {
  vu low, high;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    low[i] = i & B ? (i - B) + 16 : i;
    high[i] = i & B ? i + 16 : i + B;
  }
  const vu first = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = first;
}
#endif

// dst[j * stride + i] = src[i][j] for 16 rows, words [first, n), a multiple of 8.
static void transpose16x8(const uint32_t *const src[16], int first, int n, uint32_t *dst, int64_t stride) {
#if VW >= 8
  for (int half = 0; half < 16; half += 8)
    for (int j = first; j < n; j += 8) {
      typedef uint32_t v8 __attribute__((vector_size(32)));
      v8 r[8], t[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) r[i] = load<v8>(src[half + i] + j);
#pragma GCC unroll 4
      for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shuffle(r[i], r[i + 1], v8{0, 8, 1, 9, 4, 12, 5, 13});
        t[i + 1] = __builtin_shuffle(r[i], r[i + 1], v8{2, 10, 3, 11, 6, 14, 7, 15});
      }
#pragma GCC unroll 2
      for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
          r[i + 2 * k] = __builtin_shuffle(t[i + k], t[i + k + 2], v8{0, 1, 8, 9, 4, 5, 12, 13});
          r[i + 2 * k + 1] = __builtin_shuffle(t[i + k], t[i + k + 2], v8{2, 3, 10, 11, 6, 7, 14, 15});
        }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        store(dst + (j + i) * stride + half, __builtin_shuffle(r[i], r[i + 4], v8{0, 1, 2, 3, 8, 9, 10, 11}));
        store(dst + (j + i + 4) * stride + half, __builtin_shuffle(r[i], r[i + 4], v8{4, 5, 6, 7, 12, 13, 14, 15}));
      }
    }
#else
  for (int j = first; j < n; ++j)
    for (int i = 0; i < 16; ++i) dst[j * stride + i] = src[i][j];
#endif
}

// The same for all of n words.
static void transpose16(const uint32_t *const src[16], int n, uint32_t *dst, int64_t stride) {
#if VW == 16
  int done = 0;
  for (; done + 16 <= n; done += 16) {
    vu r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = load<vu>(src[i] + done);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (!(i & 8)) exchange<8>(r[i], r[i + 8]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (!(i & 4)) exchange<4>(r[i], r[i + 4]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (!(i & 2)) exchange<2>(r[i], r[i + 2]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (!(i & 1)) exchange<1>(r[i], r[i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) store(dst + (done + i) * stride, r[i]);
  }
  transpose16x8(src, done, n, dst, stride);
#else
  transpose16x8(src, 0, n, dst, stride);
#endif
}
