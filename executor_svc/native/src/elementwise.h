// What lies between matrix products and attention, row by row.

template <class T>
INLINE void rms_norm_row(const T *x, const T *weight, T *out, int64_t size, float eps) {
  vf squares{};
  int64_t j = 0;
  for (; j + VW <= size; j += VW) {
    const vf v = get(x + j);
    squares += v * v;
  }
  if (j < size) {
    const vf v = get(x + j, size - j);
    squares += v * v;
  }
  const float scale = 1 / __builtin_sqrtf(sum_lanes(squares) / (float)size + eps);
  for (j = 0; j + VW <= size; j += VW) put(out + j, get(x + j) * scale * get(weight + j));
  if (j < size) put(out + j, get(x + j, size - j) * scale * get(weight + j, size - j), size - j);
}

template <class T>
static void rms_norm_as(const void *x, int64_t x_stride, const void *weight, void *out, int64_t first, int64_t end,
                        int64_t size, float eps) {
  for (int64_t row = first; row < end; ++row)
    rms_norm_row((const T *)x + row * x_stride, (const T *)weight, (T *)out + row * size, size, eps);
}
static void rms_norm(const void *x, int64_t x_stride, const void *weight, void *out, int64_t first, int64_t end,
                     int64_t size, float eps, int32_t dtype) {
  if (dtype == PM_F32)
    rms_norm_as<float>(x, x_stride, weight, out, first, end, size, eps);
  else
    rms_norm_as<bf16>(x, x_stride, weight, out, first, end, size, eps);
}

INLINE vf silu(vf x) {
  const vf e = -x > 88.0f ? set1(INF) : vexp(-x);
  return x / (e + 1.0f);
}

template <class T>
static void silu_mul_as(const void *gate_up, void *out, int64_t first, int64_t end, int64_t size) {
  for (int64_t row = first; row < end; ++row) {
    const T *gate = (const T *)gate_up + row * 2 * size, *up = gate + size;
    T *to = (T *)out + row * size;
    int64_t j = 0;
    for (; j + VW <= size; j += VW) put(to + j, silu(get(gate + j)) * get(up + j));
    if (j < size) put(to + j, silu(get(gate + j, size - j)) * get(up + j, size - j), size - j);
  }
}
static void silu_mul(const void *gate_up, void *out, int64_t first, int64_t end, int64_t size, int32_t dtype) {
  if (dtype == PM_F32)
    silu_mul_as<float>(gate_up, out, first, end, size);
  else
    silu_mul_as<bf16>(gate_up, out, first, end, size);
}

// Rotates a head; the pairs are (i, i + head_dim / 2), as in Hugging Face's checkpoints of the Llama shape.
template <class T, class To>
INLINE void rotate_head(const T *x, const float *cos, const float *sin, To *to, int half) {
  int j = 0;
  for (; j + VW <= half; j += VW) {
    const vf a = get(x + j), b = get(x + half + j), c = load<vf>(cos + j), s = load<vf>(sin + j);
    put(to + j, a * c - b * s);
    put(to + half + j, b * c + a * s);
  }
  if (j < half) {
    const int64_t n = half - j;
    const vf a = get(x + j, n), b = get(x + half + j, n), c = get(cos + j, n), s = get(sin + j, n);
    put(to + j, a * c - b * s, n);
    put(to + half + j, b * c + a * s, n);
  }
}

// int8 with one scale, as `executor_svc/kv/int8_blocks.py` says, bit for bit.
template <class T>
INLINE void quantise(const T *x, int8_t *to, bf16 *scale, int size) {
  float top = 0;
  bool finite = true;
  for (int j = 0; j < size; ++j) {
    const float v = __builtin_fabsf(get1(x + j));
    finite = finite && v < INF;
    top = v > top ? v : top;
  }
  if (!finite) {
    *scale = 0x7fc0;  // reads back as NaN throughout
    __builtin_memset(to, 0, size);
    return;
  }
  *scale = narrow1(top / 127.0f);
  const float exact = widen1(*scale);
  const float inverse = exact < 1.17549435e-38f ? 0 : 1 / exact;
  for (int j = 0; j < size; ++j) to[j] = (int8_t)__builtin_rintf(get1(x + j) * inverse);
}

template <class T>
static void store_vector(const pm_pool &p, int layer, int kind, int kv_head, int64_t slot, const T *x) {
  uint8_t *block = p.base + slot / p.block_size * p.bytes_per_block;
  const int64_t vector = (((int64_t)layer * 2 + kind) * p.num_kv_heads + kv_head) * p.block_size + slot % p.block_size;
  if (p.dtype == PM_I8) {
    quantise(x, (int8_t *)block + vector * p.head_dim, (bf16 *)(block + p.scales_offset) + vector, p.head_dim);
  } else if (p.dtype == PM_F32) {
    for (int j = 0; j < p.head_dim; j += VW) put((float *)block + vector * p.head_dim + j, get(x + j));
  } else {
    for (int j = 0; j < p.head_dim; j += VW) put((bf16 *)block + vector * p.head_dim + j, get(x + j));
  }
}

template <class T>
static void rope_store_as(const pm_rope &r, int64_t first, int64_t end) {
  const pm_pool &p = *r.pool;
  const int dim = p.head_dim, half = dim / 2;
  for (int64_t token = first; token < end; ++token) {
    T *heads = (T *)r.heads + token * r.stride;
    const float *cos = r.cos + r.positions[token] * half, *sin = r.sin + r.positions[token] * half;
    for (int h = 0; h < r.num_heads + p.num_kv_heads; ++h) {
      T *x = heads + h * dim;
      const T *norm = (const T *)(h < r.num_heads ? r.query_norm : r.key_norm);
      if (norm) rms_norm_row(x, norm, x, dim, r.eps);
      rotate_head(x, cos, sin, x, half);
    }
    const T *keys = heads + r.num_heads * dim, *values = keys + p.num_kv_heads * dim;
    for (int h = 0; h < p.num_kv_heads; ++h) {
      store_vector(p, r.layer, 0, h, r.slots[token], keys + h * dim);
      store_vector(p, r.layer, 1, h, r.slots[token], values + h * dim);
    }
  }
}
static void rope_store(const pm_rope &r, int64_t first, int64_t end) {
  if (r.dtype == PM_F32)
    rope_store_as<float>(r, first, end);
  else
    rope_store_as<bf16>(r, first, end);
}
