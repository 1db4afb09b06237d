// y = x W + bias (+ residual) with bf16 weights and sums in float.
//
// Weights are packed once: panels of 16 outputs, [panel][pair][16][2], pairs of inputs side by side, an odd one beside a
// zero. CPUs that multiply pairs of bf16 take them as they are. Others widen them: few rows on the way, for many a panel
// once for all. Each output is the sum over its inputs from first to last, however many rows there are, so a row's
// result does not depend on the others.

constexpr int PANEL = PM_PANEL;
constexpr int PANEL_VECTORS = PANEL / VW;
#if DOT_BF16 || defined(PM_EMULATE_DOT)
constexpr bool DOT_LINEAR = true;
#else
constexpr bool DOT_LINEAR = false;
#endif
// Rows whose inputs stay in the second-level cache while panels pass by, and pairs of inputs of some panels that stay in
// the first while rows pass by.
constexpr int BLOCK_ROWS = DOT_LINEAR ? PM_LINEAR_ROWS : PM_LINEAR_ROWS / 2;
constexpr int PAIRS_AT_ONCE = 144;
constexpr int FEW_ROWS = 12;

INLINE vf low_half(vu pair) { return as_f(pair << 16); }
INLINE vf high_half(vu pair) { return as_f(pair & 0xffff0000u); }

template <int R>
INLINE void narrow_panel(const float *x, int64_t stride, const uint32_t *panel, float *y, int64_t in) {
  vf sums[R][PANEL_VECTORS] = {};
  for (int64_t i = 0; i < in; i += 2, panel += PANEL) {
    vu w[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < PANEL_VECTORS; ++j) w[j] = load<vu>(panel + j * VW);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < PANEL_VECTORS; ++j) sums[r][j] = set1(x[r * stride + i]) * low_half(w[j]) + sums[r][j];
    if (i + 1 == in) break;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < PANEL_VECTORS; ++j) sums[r][j] = set1(x[r * stride + i + 1]) * high_half(w[j]) + sums[r][j];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < PANEL_VECTORS; ++j) store(y + r * PANEL + j * VW, sums[r][j]);
}

INLINE void narrow_rows(const float *x, int64_t stride, const uint32_t *panel, float *y, int rows, int64_t in) {
  constexpr int most = VW == 4 ? 3 : 6;
  int r = 0;
  for (; r + most <= rows; r += most) narrow_panel<most>(x + r * stride, stride, panel, y + r * PANEL, in);
  for (; r + 2 <= rows; r += 2) narrow_panel<2>(x + r * stride, stride, panel, y + r * PANEL, in);
  if (r < rows) narrow_panel<1>(x + r * stride, stride, panel, y + r * PANEL, in);
}

INLINE void wide_rows(const float *x, int64_t stride, const uint32_t *panel, float *room, float *y, int rows,
                      int64_t in) {
  for (int64_t i = 0; i < in; i += 2)
    for (int j = 0; j < PANEL; j += VW) {
      const vu pair = load<vu>(panel + i / 2 * PANEL + j);
      store(room + i * PANEL + j, low_half(pair));
      store(room + (i + 1) * PANEL + j, high_half(pair));  // of an odd number of inputs one more than is needed
    }
  constexpr int vectors = PANEL_VECTORS < GEMM_VECTORS ? PANEL_VECTORS : GEMM_VECTORS;
  for (int j = 0; j < PANEL; j += vectors * VW)
    gemm_rows<false, vectors>((const uint32_t *)x, stride, (const uint32_t *)room + j, PANEL, y + j, PANEL, rows, in);
}

// Writes the results y (rows, PANEL) of one panel, whose first output is `column`, with what is added to them. Of several
// panels all results of a row come together: rows of many outputs share few places in the caches.
template <class T, class Bias>
INLINE void finish_rows(void *out, const void *residual, const Bias *bias, int64_t out_features, int64_t first_row,
                        int rows, int64_t column, const float *y, int panels = 1, int64_t next_panel = 0) {
  const int64_t width = out_features - column < panels * PANEL ? out_features - column : panels * PANEL;
  for (int r = 0; r < rows; ++r) {
    const int64_t at = (first_row + r) * out_features + column;
    for (int j = 0; j < panels * PANEL; j += VW) {
      vf sum = load<vf>(y + j / PANEL * next_panel + r * PANEL + j % PANEL);
      const int64_t left = width - j;
      if (left >= VW) {
        if (bias) sum += get(bias + column + j);
        if (residual) sum += get((const T *)residual + at + j);
        put((T *)out + at + j, sum);
      } else if (left > 0) {
        if (bias) sum += get(bias + column + j, left);
        if (residual) sum += get((const T *)residual + at + j, left);
        put((T *)out + at + j, sum, left);
      }
    }
  }
}

INLINE void finish_panels(const pm_linear &l, int64_t row, int rows, int64_t p, const float *y, int panels = 1) {
  const bf16 *bias = (const bf16 *)l.bias;
  if (l.dtype == PM_F32)
    finish_rows<float>(l.out, l.residual, bias, l.out_features, row, rows, p * PANEL, y, panels,
                       BLOCK_ROWS * PANEL);
  else
    finish_rows<bf16>(l.out, l.residual, bias, l.out_features, row, rows, p * PANEL, y, panels,
                       BLOCK_ROWS * PANEL);
}

// Inputs as floats, rows [first, end), to `x` (rows, in).
static void linear_inputs(const pm_linear &l, float *x, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) {
    const bf16 *from = (const bf16 *)l.x + row * l.x_stride;
    float *to = x + row * l.in_features;
    int64_t j = 0;
    for (; j + VW <= l.in_features; j += VW) put(to + j, get(from + j));
    for (; j < l.in_features; ++j) to[j] = get1(from + j);
  }
}

// Adds the products of pairs [0, pairs) of R rows and C panels to y (C, BLOCK_ROWS, PANEL), or begins it.
template <int R, int C>
INLINE void dot_tile(const bf16 *x, int64_t stride, const uint32_t *panel, int64_t next_panel, float *y, int64_t pairs,
                     bool begins) {
  constexpr int vectors = C * PANEL_VECTORS;
  vf sums[R][vectors] = {};
  const auto place = [&](int r, int j) {
    return y + j / PANEL_VECTORS * (BLOCK_ROWS * PANEL) + r * PANEL + j % PANEL_VECTORS * VW;
  };
  if (!begins)
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < vectors; ++j) sums[r][j] = load<vf>(place(r, j));
  for (int64_t i = 0; i < pairs; ++i) {
    vu column[vectors];
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j)
      column[j] = load<vu>(panel + j / PANEL_VECTORS * next_panel + i * PANEL + j % PANEL_VECTORS * VW);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      uint32_t word;
      __builtin_memcpy(&word, x + r * stride + 2 * i, sizeof word);
#pragma GCC unroll 8
      for (int j = 0; j < vectors; ++j) sums[r][j] = multiply_add<true>(sums[r][j], vu{} + word, column[j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < vectors; ++j) store(place(r, j), sums[r][j]);
}

template <int C>
static void dot_panels(const bf16 *x, int64_t stride, const uint32_t *panel, int64_t next_panel, int64_t pairs, float *y,
                       int rows) {
  constexpr int most = VW == 16 ? 6 : 2;
  int64_t first = 0;
  do {  // once also without pairs
    const int64_t count = pairs - first < PAIRS_AT_ONCE ? pairs - first : PAIRS_AT_ONCE;
    const bf16 *from = x + 2 * first;
    const uint32_t *at = panel + first * PANEL;
    const bool begins = first == 0;
    int r = 0;
    for (; r + most <= rows; r += most)
      dot_tile<most, C>(from + r * stride, stride, at, next_panel, y + r * PANEL, count, begins);
    for (; r + 2 <= rows; r += 2)
      dot_tile<2, C>(from + r * stride, stride, at, next_panel, y + r * PANEL, count, begins);
    if (r < rows) dot_tile<1, C>(from + r * stride, stride, at, next_panel, y + r * PANEL, count, begins);
    first += PAIRS_AT_ONCE;
  } while (first < pairs);
}

// C panels for `rows` rows of bf16 from `row` on.
template <int C>
static void dot_rows(const pm_linear &l, float *y, int64_t row, int rows, int64_t p) {
  const int64_t pairs = (l.in_features + 1) / 2, whole = l.in_features / 2;
  const bf16 *x = (const bf16 *)l.x + row * l.x_stride;
  const uint32_t *panel = (const uint32_t *)l.weight + p * pairs * PANEL;
  dot_panels<C>(x, l.x_stride, panel, pairs * PANEL, whole, y, rows);
  if (whole < pairs)
    for (int c = 0; c < C; ++c)
      for (int r = 0; r < rows; ++r)
        for (int j = 0; j < PANEL; j += VW) {
          const vu w = load<vu>(panel + (c * pairs + whole) * PANEL + j);
          float *to = y + (c * BLOCK_ROWS + r) * PANEL + j;
          store(to, set1(widen1(x[r * l.x_stride + l.in_features - 1])) * low_half(w) + load<vf>(to));
        }
  finish_panels(l, row, rows, p, y, C);
}

// Panels [first, end) for all rows. `room` is the thread's own: results of BLOCK_ROWS rows and PM_LINEAR_PANELS panels, or
// a widened panel and results of one. Where products take bf16 themselves, such inputs are read from where they are.
static void linear(const pm_linear &l, const float *x, int64_t stride, float *room, int64_t first, int64_t end) {
  for (int64_t row = 0; row < l.rows; row += BLOCK_ROWS) {
    const int rows = l.rows - row < BLOCK_ROWS ? (int)(l.rows - row) : BLOCK_ROWS;
    int64_t p = first;
    if (DOT_LINEAR && l.dtype == PM_BF16) {
      for (; p + 4 <= end; p += 4) dot_rows<4>(l, room, row, rows, p);
      for (; p + 2 <= end; p += 2) dot_rows<2>(l, room, row, rows, p);
      if (p < end) dot_rows<1>(l, room, row, rows, p);
      continue;
    }
    float *y = room + (l.in_features + 1) * PANEL;
    for (; p < end; ++p) {
      const uint32_t *panel = (const uint32_t *)l.weight + p * ((l.in_features + 1) / 2) * PANEL;
      if (rows <= FEW_ROWS)
        narrow_rows(x + row * stride, stride, panel, y, rows, l.in_features);
      else
        wide_rows(x + row * stride, stride, panel, room, y, rows, l.in_features);
      finish_panels(l, row, rows, p, y);
    }
  }
}
