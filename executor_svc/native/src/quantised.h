// y = x W + bias (+ residual) with weights in 8 or 4 bits. Inputs are quantised row by row, each for itself, and sums of
// integers are exact, so a row's result does not depend on the others. What is kept packed is unpacked on the way.

constexpr float ROUND = 12582912.0f;  // added to |x| < 2^22, it leaves the nearest integer in the low bits

// A group of `size` inputs to `to`, where zeros follow up to the next multiple of VW, and what belongs to it to place
// `group`. Not finite: NaN for the group.
template <class T>
INLINE void quantise_group(const T *x, int64_t size, const pm_int8_rows &rows, int8_t *to, int64_t group) {
  const int64_t whole = size / VW * VW;
  vi top{};  // magnitudes as integers, of which those that are no numbers are the largest
  const auto look = [&](vf v) {
    const vi magnitude = (vi)(as_u(v) & 0x7fffffffu);
    top = magnitude > top ? magnitude : top;
  };
  for (int64_t j = 0; j < whole; j += VW) look(get(x + j));
  if (whole < size) look(get(x + whole, size - whole));
  const float most = as_f((vu)join_halves<VW / 2>(top, [&](vi a, vi b) { return a > b ? a : b; }))[0];
  const bool all = most < INF;
  const float scale = all ? most / 127.0f : __builtin_nanf("");
  const vf inverse = set1(!all || most < 1e-36f ? 0 : 127.0f / most);
  vi sums{};
  const auto convert = [&](vf v, int64_t j) {
    vf q = v * inverse;
    q = q < 127.0f ? q : set1(127.0f);  // not only a bound: product and sum in one rounding would be other bits
    q = q > -127.0f ? q : set1(-127.0f);
    const vi n = (vi)as_u(q + ROUND) - (vi)as_u(set1(ROUND));
    sums += n;
    store(to + j, __builtin_convertvector(n, vb));
  };
  if (!all) {
    __builtin_memset(to, 0, (size + VW - 1) / VW * VW);
  } else {
    for (int64_t j = 0; j < whole; j += VW) convert(get(x + j), j);
    if (whole < size) convert(get(x + whole, size - whole), whole);
  }
  const int32_t sum = sum_lanes(sums);
  rows.scales[group] = scale;
  rows.starts[group] = -INT8_OFFSET * sum;
  rows.scaled_sums[group] = scale * (float)sum;
}

template <class T>
static void quantise_as(const pm_quantised &q, const pm_int8_rows &x, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row)
    for (int64_t g = 0; g < x.groups; ++g) {
      const int64_t from = g * PM_GROUP, left = q.in_features - from;
      int8_t *to = x.values + row * x.stride + from;
      if (left < PM_GROUP) __builtin_memset(to, 0, PM_GROUP);
      quantise_group((const T *)q.x + row * q.x_stride + from, left < PM_GROUP ? left : (int64_t)PM_GROUP, x, to,
                     row * x.groups + g);
    }
}
static void quantise_inputs(const pm_quantised &q, const pm_int8_rows &x, int64_t first, int64_t end) {
  if (q.dtype == PM_F32)
    quantise_as<float>(q, x, first, end);
  else
    quantise_as<bf16>(q, x, first, end);
}

// What belongs to some panels, one after another. C vectors of outputs, from `column` of the first panel on, are part of
// one panel or whole ones: vector c begins in panel c * VW / PANEL, at its output c * VW % PANEL.
struct QuantisedPanels {
  const uint8_t *values;
  const uint8_t *scales, *mins;
  int64_t next_values, next_scales;  // bytes to those of the next panel
};
constexpr int WORD_BYTES = PANEL * 4;

INLINE const uint8_t *values_at(const QuantisedPanels &p, int column, int c) {
  return p.values + c * VW / PANEL * p.next_values + (column + c * VW % PANEL) * 4;
}
template <class T>
INLINE const T *scales_at(const QuantisedPanels &p, const uint8_t *of_all, int column, int c) {
  return (const T *)(of_all + c * VW / PANEL * p.next_scales) + column + c * VW % PANEL;
}
INLINE float *result_at(float *y, int row, int column, int c) {
  return y + (c * VW / PANEL * BLOCK_ROWS + row) * PANEL + column + c * VW % PANEL;
}

// Scales of weights: one per output, or one per output and group.
template <bool OWN_SCALES>
struct Int8 {
  template <int R, int C>
  INLINE void compute(const pm_int8_rows &x, int64_t row, const QuantisedPanels &p, int column, float *y) {
    vf out[R][C] = {};
    for (int64_t g = 0; g < x.groups; ++g) {
      vi sums[R][C];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = vi{} + x.starts[(row + r) * x.groups + g];
      const int8_t *input = x.values + row * x.stride + g * PM_GROUP;
      const int64_t words = g * (PM_GROUP / 4 * WORD_BYTES);
#pragma GCC unroll 1  // see Int4
      for (int i = 0; i < PM_GROUP / 4; ++i) {
        Int8Weights w[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) w[c] = int8_weights(load<vu>(values_at(p, column, c) + words + i * WORD_BYTES));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const vu word = spread_word(input + r * x.stride + i * 4);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[r][c] = dot_int8(sums[r][c], w[c], word);
        }
      }
      vf scale[C];
      if (OWN_SCALES)
        for (int c = 0; c < C; ++c) scale[c] = get_half(scales_at<uint16_t>(p, p.scales, column, c) + g * PANEL);
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r) * x.groups + g;
        for (int c = 0; c < C; ++c) {
          const vf sum = __builtin_convertvector(sums[r][c], vf);
          if (OWN_SCALES)
            out[r][c] += sum * x.scales[at] * scale[c];
          else
            out[r][c] += sum * x.scales[at];
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        if (!OWN_SCALES) out[r][c] *= get(scales_at<float>(p, p.scales, column, c));
        store(result_at(y, r, column, c), out[r][c]);
      }
  }
};

struct Int4 {
  template <int R, int C>
  INLINE void compute(const pm_int8_rows &x, int64_t row, const QuantisedPanels &p, int column, float *y) {
    vf out[R][C] = {};
    for (int64_t g = 0; g < x.groups; ++g) {
      NibbleSum sums[R][C] = {};
      const int8_t *input = x.values + row * x.stride + g * PM_GROUP;
      const int64_t words = g * (PM_GROUP / 8 * WORD_BYTES);
#pragma GCC unroll 1  // unrolled, all products come first and their sums, which do not fit the registers, later
      for (int i = 0; i < PM_GROUP / 8; ++i) {
        vu low[C], high[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          const vu packed = load<vu>(values_at(p, column, c) + words + i * WORD_BYTES);
          low[c] = packed & 0x0f0f0f0fu;
          high[c] = packed >> 4 & 0x0f0f0f0fu;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const int8_t *word = input + r * x.stride + i * 4;
          const vu first = spread_word(word), second = spread_word(word + PM_GROUP / 2);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[r][c] = dot_nibbles(sums[r][c], low[c], first);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sums[r][c] = dot_nibbles(sums[r][c], high[c], second);
        }
      }
      vf scale[C], least[C];
      for (int c = 0; c < C; ++c) {
        scale[c] = get_half(scales_at<uint16_t>(p, p.scales, column, c) + g * PANEL);
        least[c] = p.mins ? get_half(scales_at<uint16_t>(p, p.mins, column, c) + g * PANEL) : scale[c] * -8.0f;
      }
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r) * x.groups + g;
        for (int c = 0; c < C; ++c) {
          out[r][c] += __builtin_convertvector(total(sums[r][c]), vf) * x.scales[at] * scale[c];
          out[r][c] += least[c] * x.scaled_sums[at];
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) store(result_at(y, r, column, c), out[r][c]);
  }
};

// R rows, C vectors of outputs: what the registers take.
template <class Format, int R, int C>
INLINE void panel_rows(const pm_int8_rows &x, int64_t row, const QuantisedPanels &p, float *y) {
  for (int column = 0; column < PANEL; column += C * VW) Format::template compute<R, C>(x, row, p, column, y);
}
template <class Format, int C>
static void quantised_rows(const pm_int8_rows &x, int64_t first, int rows, const QuantisedPanels &p, float *y) {
  constexpr int most = VW == 16 ? 6 : VW == 8 ? 4 : 2;
  int r = 0;
  for (; r + most <= rows; r += most) panel_rows<Format, most, C>(x, first + r, p, y + r * PANEL);
  for (; r + 2 <= rows; r += 2) panel_rows<Format, 2, C>(x, first + r, p, y + r * PANEL);
  if (r < rows) panel_rows<Format, 1, C>(x, first + r, p, y + r * PANEL);
}

// Panels [first, end) for all rows, as many at once as C vectors are, at least one. Returns how far it came.
template <class Format, int C>
static int64_t quantised_panels(const pm_quantised &q, const pm_int8_rows &x, float *y, int64_t row, int rows,
                                int64_t first, int64_t end) {
  constexpr int panels = C * VW > PANEL ? C * VW / PANEL : 1;
  const int64_t group_bytes = q.format == PM_INT4_GROUPS ? PM_GROUP / 8 * WORD_BYTES : PM_GROUP / 4 * WORD_BYTES;
  const int64_t values = x.groups * group_bytes;
  const int64_t scales = q.format == PM_INT8_ROWS ? PANEL * sizeof(float) : x.groups * PANEL * sizeof(uint16_t);
  for (; first + panels <= end; first += panels) {
    const QuantisedPanels p = {q.values + first * values, (const uint8_t *)q.scales + first * scales,
                               q.mins ? (const uint8_t *)q.mins + first * scales : nullptr, values, scales};
    quantised_rows<Format, C>(x, row, rows, p, y);
    if (q.dtype == PM_F32)
      finish_rows<float>(q.out, q.residual, q.bias, q.out_features, row, rows, first * PANEL, y, panels,
                         BLOCK_ROWS * PANEL);
    else
      finish_rows<bf16>(q.out, q.residual, q.bias, q.out_features, row, rows, first * PANEL, y, panels,
                        BLOCK_ROWS * PANEL);
  }
  return first;
}

template <class Format>
static void quantised_as(const pm_quantised &q, const pm_int8_rows &x, float *room, int64_t first, int64_t end) {
  for (int64_t row = 0; row < q.rows; row += BLOCK_ROWS) {
    const int rows = q.rows - row < BLOCK_ROWS ? (int)(q.rows - row) : BLOCK_ROWS;
    // Of few rows one panel at a time: memory is what counts then, and gives one stream faster than two.
    const bool both = VW < 16 || rows >= 6;
    const int64_t left = both ? quantised_panels<Format, 2>(q, x, room, row, rows, first, end) : first;
    if (VW == 16) quantised_panels<Format, 1>(q, x, room, row, rows, left, end);
  }
}

// Panels [first, end) for all rows. `room`: results of BLOCK_ROWS rows and two panels, the thread's own.
static void quantised(const pm_quantised &q, const pm_int8_rows &x, float *room, int64_t first, int64_t end) {
  if (q.format == PM_INT8_ROWS)
    quantised_as<Int8<false>>(q, x, room, first, end);
  else if (q.format == PM_INT8_GROUPS)
    quantised_as<Int8<true>>(q, x, room, first, end);
  else
    quantised_as<Int4>(q, x, room, first, end);
}
