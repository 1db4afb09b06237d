// y = x W + bias (+ residual) with bf16 weights and sums in float, for CPUs whose libraries multiply bf16 slowly.
//
// Weights are packed once: panels of 16 outputs, [panel][in][16]. Few rows read a panel as it is and widen it on the way;
// for many it is widened once, for all of them. Each output is the sum over `in` from first to last, however many rows
// there are, so a row's result does not depend on the others.

constexpr int PANEL = PM_PANEL;
constexpr int PANEL_VECTORS = PANEL / VW;
constexpr int BLOCK_ROWS = PM_LINEAR_ROWS;  // rows whose inputs stay in the second-level cache while panels pass by
constexpr int FEW_ROWS = 12;

template <int R>
INLINE void narrow_panel(const float *x, int64_t stride, const bf16 *panel, float *y, int64_t in) {
  vf sums[R][PANEL_VECTORS] = {};
  for (int64_t i = 0; i < in; ++i) {
    vf w[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < PANEL_VECTORS; ++j) w[j] = get(panel + i * PANEL + j * VW);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf value = set1(x[r * stride + i]);
#pragma GCC unroll 4
      for (int j = 0; j < PANEL_VECTORS; ++j) sums[r][j] = value * w[j] + sums[r][j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < PANEL_VECTORS; ++j) store(y + r * PANEL + j * VW, sums[r][j]);
}

INLINE void narrow_rows(const float *x, int64_t stride, const bf16 *panel, float *y, int rows, int64_t in) {
  constexpr int most = VW == 4 ? 3 : 6;
  int r = 0;
  for (; r + most <= rows; r += most) narrow_panel<most>(x + r * stride, stride, panel, y + r * PANEL, in);
  for (; r + 2 <= rows; r += 2) narrow_panel<2>(x + r * stride, stride, panel, y + r * PANEL, in);
  if (r < rows) narrow_panel<1>(x + r * stride, stride, panel, y + r * PANEL, in);
}

INLINE void wide_rows(const float *x, int64_t stride, const bf16 *panel, float *room, float *y, int rows, int64_t in) {
  for (int64_t i = 0; i < in * PANEL; i += VW) store(room + i, get(panel + i));
  constexpr int vectors = PANEL_VECTORS < GEMM_VECTORS ? PANEL_VECTORS : GEMM_VECTORS;
  for (int j = 0; j < PANEL; j += vectors * VW)
    gemm_rows<false, vectors>((const uint32_t *)x, stride, (const uint32_t *)room + j, PANEL, y + j, PANEL, rows, in);
}

// Writes the results y (rows, PANEL) of one panel, whose first output is `column`, with what is added to them.
template <class T, class Bias>
INLINE void finish_rows(void *out, const void *residual, const Bias *bias, int64_t out_features, int64_t first_row,
                        int rows, int64_t column, const float *y) {
  const int64_t width = out_features - column < PANEL ? out_features - column : PANEL;
  for (int r = 0; r < rows; ++r) {
    const int64_t at = (first_row + r) * out_features + column;
    for (int j = 0; j < PANEL; j += VW) {
      vf sum = load<vf>(y + r * PANEL + j);
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

// Panels [first, end) for all rows. `room` is the thread's own: a widened panel, then BLOCK_ROWS results.
static void linear(const pm_linear &l, const float *x, int64_t stride, float *room, int64_t first, int64_t end) {
  float *y = room + l.in_features * PANEL;
  for (int64_t row = 0; row < l.rows; row += BLOCK_ROWS) {
    const int rows = l.rows - row < BLOCK_ROWS ? (int)(l.rows - row) : BLOCK_ROWS;
    for (int64_t p = first; p < end; ++p) {
      const bf16 *panel = (const bf16 *)l.weight + p * l.in_features * PANEL;
      if (rows <= FEW_ROWS)
        narrow_rows(x + row * stride, stride, panel, y, rows, l.in_features);
      else
        wide_rows(x + row * stride, stride, panel, room, y, rows, l.in_features);
      const bf16 *bias = (const bf16 *)l.bias;
      if (l.dtype == PM_F32)
        finish_rows<float>(l.out, l.residual, bias, l.out_features, row, rows, p * PANEL, y);
      else
        finish_rows<bf16>(l.out, l.residual, bias, l.out_features, row, rows, p * PANEL, y);
    }
  }
}
