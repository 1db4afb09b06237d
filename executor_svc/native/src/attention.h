// Attention of some query rows over some tiles of one KV head, online over tiles (Milakov and Gimelshein 2018, as in
// FlashAttention), with the heads of a group and all tokens of an item as rows of one matrix:
//
//   pack K  (words, positions)   scores = Q K     weights = exp(scale * scores - max)
//   pack V  (positions, words)   result = weights V, then added to the rows' states
//
// Packing brings blocks of any size and type into one form. With DOT keys, values, queries and weights are bf16, sums
// float; int8 becomes bf16 without loss, its scales multiply scores and weights. Without DOT everything is float.

struct Scratch {
  uint32_t *query, *packed, *weights, *words;
  float *scores, *result, *key_scales, *value_scales;
  float *tile_max, *tile_sum;
  float *max, *sum, *out;  // the states of the rows: per row the largest score, the sum of weights, the weighted values

  Scratch(uint8_t *memory, int rows, int head_dim) {
    uint8_t *p = memory;
    const int64_t n = rows;
    query = take<uint32_t>(p, n * head_dim);
    packed = take<uint32_t>(p, (int64_t)PM_TILE * head_dim);
    weights = take<uint32_t>(p, n * PM_TILE);
    words = take<uint32_t>(p, 16 * (int64_t)head_dim);
    scores = take<float>(p, n * PM_TILE);
    result = take<float>(p, n * head_dim);
    key_scales = take<float>(p, PM_TILE);
    value_scales = take<float>(p, PM_TILE);
    tile_max = take<float>(p, n);
    tile_sum = take<float>(p, n);
    max = take<float>(p, n);
    sum = take<float>(p, n);
    out = take<float>(p, n * head_dim);
    bytes = p - memory;
  }
  int64_t bytes;

 private:
  template <class T>
  static T *take(uint8_t *&p, int64_t count) {
    T *taken = (T *)p;
    p += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
  }
};

INLINE int item_rows(const pm_attention &a) {
  const int heads = a.rows->num_heads / a.pool->num_kv_heads;
  return heads > PM_ITEM_ROWS ? heads : PM_ITEM_ROWS;
}

static int64_t scratch_bytes(const pm_attention &a) {
  return Scratch(nullptr, item_rows(a), a.pool->head_dim).bytes;
}

// Goes through K (kind 0) or V (kind 1) of a row's positions, in order. A division for each position would take as long
// as all else that packing does.
class Walk {
 public:
  struct Place {
    const uint8_t *vector;
    const bf16 *scale;
  };
  const int64_t vector_bytes;

  Walk(const pm_attention &a, const pm_item &item, int kind, int position)
      : vector_bytes(a.pool->head_dim * (a.pool->dtype == PM_F32 ? 4 : a.pool->dtype == PM_BF16 ? 2 : 1)),
        p(*a.pool),
        table(a.rows->tables + (int64_t)item.row * a.rows->table_width + position / a.pool->block_size),
        first((((int64_t)a.layer * 2 + kind) * p.num_kv_heads + item.kv_head) * p.block_size) {
    enter(position % p.block_size);
  }
  __attribute__((always_inline)) Place take() { return take_run(1, nullptr); }
  // The first of up to `count` positions that lie together, of which there are *taken.
  __attribute__((always_inline)) Place take_run(int count, int *taken) {
    if (left == 0) enter(0);
    if (taken) *taken = count = left < count ? left : count;
    const Place at = next;
    next.vector += count * vector_bytes;
    next.scale += count;
    left -= count;
    return at;
  }

 private:
  __attribute__((always_inline)) void enter(int offset) {
    const uint8_t *block = p.base + *table++ * p.bytes_per_block;
    next = {block + (first + offset) * vector_bytes, (const bf16 *)(block + p.scales_offset) + first + offset};
    left = p.block_size - offset;
  }
  const pm_pool &p;
  const int32_t *table;
  const int64_t first;
  Place next;
  int left;
};

// Asks the memory for K or V of positions. Blocks lie far apart, so a processor does not see what comes next; that it
// waited for each block anew took most of the time of decode rows.
struct Ahead {
  const pm_item *item;  // null: nothing
  int kind, first, end;  // positions
};
INLINE void prefetch(const pm_attention &a, const Ahead &ahead, int from, int count) {
  const int position = ahead.first + from;
  if (!ahead.item || position >= ahead.end) return;
  if (count > ahead.end - position) count = ahead.end - position;
  Walk walk(a, *ahead.item, ahead.kind, position);
  while (count > 0) {
    int run;
    const uint8_t *begin = walk.take_run(count, &run).vector;
    for (int64_t at = 0; at < run * walk.vector_bytes; at += 64) __builtin_prefetch(begin + at, 0, 3);
    count -= run;
  }
}

// A vector of the pool as words: floats, or with DOT pairs of bf16. `room` is used where it must be converted.
template <bool DOT, class KV>
INLINE const uint32_t *as_words(const uint8_t *vector, int head_dim, uint32_t *room) {
  const KV *p = (const KV *)vector;
  if constexpr (DOT ? sizeof(KV) == 2 : sizeof(KV) == 4) return (const uint32_t *)p;
  for (int i = 0; i < head_dim; i += VW) {
    if constexpr (DOT)
      put((bf16 *)room + i, get(p + i));
    else
      put((float *)room + i, get(p + i));
  }
  return room;
}

// The keys of `count` positions from `first` on, transposed; zeros up to a multiple of 16.
template <bool DOT, class KV>
static void pack_keys(const pm_attention &a, const pm_item &item, int first, int count, const Ahead &ahead, Scratch &s) {
  const int head_dim = a.pool->head_dim, words = DOT ? head_dim / 2 : head_dim;
  Walk walk(a, item, 0, first);
  for (int base = 0; base < count; base += 16) {
    prefetch(a, ahead, base, 16);
    const uint32_t *rows[16];
    for (int i = 0; i < 16; ++i) {
      uint32_t *room = s.words + i * head_dim;
      if (base + i < count) {
        const Walk::Place at = walk.take();
        rows[i] = as_words<DOT, KV>(at.vector, head_dim, room);
        if constexpr (sizeof(KV) == 1) s.key_scales[base + i] = widen1(*at.scale);
      } else {
        __builtin_memset(room, 0, words * 4);
        rows[i] = room;
        s.key_scales[base + i] = 0;
      }
    }
    transpose16(rows, words, s.packed + base, PM_TILE);
  }
}

// The values of these positions, row by row, with DOT in pairs of rows; zeros up to an even number.
template <bool DOT, class KV>
static void pack_values(const pm_attention &a, const pm_item &item, int first, int count, const Ahead &ahead, Scratch &s) {
  const int head_dim = a.pool->head_dim;
  Walk walk(a, item, 1, first);
  for (int i = 0; i < count; i += DOT ? 2 : 1) {
    if (i % 16 == 0) prefetch(a, ahead, i, 16);
    const Walk::Place at = walk.take();
    if constexpr (!DOT) {
      for (int j = 0; j < head_dim; j += VW) put((float *)s.packed + i * head_dim + j, get((const KV *)at.vector + j));
    } else {
      const bf16 *even = (const bf16 *)as_words<DOT, KV>(at.vector, head_dim, s.words), *odd = nullptr;
      if (i + 1 < count) {
        const Walk::Place next = walk.take();
        odd = (const bf16 *)as_words<DOT, KV>(next.vector, head_dim, s.words + head_dim);
        if constexpr (sizeof(KV) == 1) s.value_scales[i + 1] = widen1(*next.scale);
      }
      uint32_t *to = s.packed + (int64_t)(i / 2) * head_dim;
      int j = 0;
      if (odd)
        for (; j + 2 * VW <= head_dim; j += 2 * VW) interleave(load<vhh>(even + j), load<vhh>(odd + j), to + j);
      for (; j < head_dim; j += VW) {
        vu pair = __builtin_convertvector(load<vh>(even + j), vu);
        if (odd) pair |= __builtin_convertvector(load<vh>(odd + j), vu) << 16;
        store(to + j, pair);
      }
    }
    if constexpr (sizeof(KV) == 1) s.value_scales[i] = widen1(*at.scale);
  }
}

// Scores of one row to weights: those of positions in [low, high) of the tile, all others 0.
template <bool DOT, bool SCALES>
INLINE void weigh(const Scratch &s, int row, int width, int low, int high, float scale, float &max, float &sum) {
  float *scores = s.scores + (int64_t)row * PM_TILE;
  const vf none = set1(-INF);
  vf top = none;
  for (int j = 0; j < width; j += VW) {
    vf x = load<vf>(scores + j) * scale;
    if constexpr (SCALES) x *= load<vf>(s.key_scales + j);
    if (j < low || j + VW > high) {
      for (int i = 0; i < VW; ++i)
        if (j + i < low || j + i >= high) x[i] = -INF;
    }
    store(scores + j, x);
    top = vmax(x, top);
  }
  max = max_lanes(top);
  vf total{};
  for (int j = 0; j < width; j += VW) {
    vf w = vexp(load<vf>(scores + j) - max);
    total += w;
    if constexpr (SCALES) w *= load<vf>(s.value_scales + j);
    if constexpr (DOT)
      store((bf16 *)(s.weights + (int64_t)row * PM_TILE) + j, narrow_normal(w));
    else
      put((float *)(s.weights + (int64_t)row * PM_TILE) + j, w);
  }
  sum = sum_lanes(total);
}

// Adds a tile's result to a row's state; a state whose sum is 0 and whose largest score is -inf is empty.
INLINE void add_state(float &max, float &sum, float *out, float tile_max, float tile_sum, const float *tile,
                      int head_dim) {
  if (max == -INF && sum == 0) {
    max = tile_max;
    sum = tile_sum;
    for (int j = 0; j < head_dim; j += VW) store(out + j, load<vf>(tile + j));
    return;
  }
  const float top = max > tile_max ? max : tile_max;
  const float old = exp1(max - top), fresh = exp1(tile_max - top);
  max = top;
  sum = sum * old + tile_sum * fresh;
  for (int j = 0; j < head_dim; j += VW)
    store(out + j, load<vf>(out + j) * old + load<vf>(tile + j) * fresh);
}

// States in the workspace: of all tokens (token, head), or of the tiles of one item (tile, row), each
// max, sum, out[head_dim].
INLINE float *token_state(const pm_attention &a, int token, int head) {
  return a.workspace + ((int64_t)token * a.rows->num_heads + head) * (a.pool->head_dim + 2);
}
INLINE void save_state(float *to, float max, float sum, const float *out, int head_dim) {
  to[0] = max;
  to[1] = sum;
  __builtin_memcpy(to + 2, out, head_dim * sizeof(float));
}

template <class T>
INLINE void write_out(const pm_attention &a, int token, int head, float sum, const float *out) {
  const int head_dim = a.pool->head_dim;
  T *to = (T *)a.out + ((int64_t)token * a.rows->num_heads + head) * head_dim;
  const float inverse = 1 / sum;  // 0 if no score was finite: the row becomes NaN and fails, alone
  for (int j = 0; j < head_dim; j += VW) put(to + j, load<vf>(out + j) * inverse);
}

INLINE int item_token(const pm_attention &a, const pm_item &item, int i) {
  return item.flags & PM_GROUPED ? a.groups->tokens[item.token + i] : item.token + i;
}

template <bool DOT, class Q>
INLINE void copy_queries(const pm_attention &a, const pm_item &item, int heads, Scratch &s) {
  const int head_dim = a.pool->head_dim;
  for (int i = 0; i < item.num_tokens; ++i) {
    const Q *from = (const Q *)a.query + item_token(a, item, i) * a.query_stride + (int64_t)item.kv_head * heads * head_dim;
    for (int g = 0; g < heads; ++g) {
      uint32_t *to = s.query + (int64_t)(i * heads + g) * head_dim;
      for (int j = 0; j < head_dim; j += VW) {
        const vf x = get(from + g * head_dim + j);
        if constexpr (DOT)
          put((bf16 *)to + j, x);
        else
          put((float *)to + j, x);
      }
    }
  }
}

// Whether a row of the item sees any position of the tile; which ones, counted from the tile's first.
struct Visible {
  int low, high;
  bool any;
};
INLINE Visible visible(const pm_attention &a, const pm_item &item, int tile, int row, int heads) {
  if (item.flags & PM_GROUPED) return {0, PM_TILE, true};
  const int position = item.position + row / heads - tile * PM_TILE;
  const int low = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
  return {low, position + 1, position >= 0 && low < PM_TILE};
}

// Positions of a tile that any row of the item sees.
INLINE int tile_positions(const pm_item &item, int tile) {
  const int seen = item.flags & PM_GROUPED ? PM_TILE : item.position + item.num_tokens - tile * PM_TILE;
  return seen < PM_TILE ? seen : PM_TILE;
}

// The keys of the tile that comes next, which may be of another item.
INLINE Ahead keys_of_next(const pm_attention &a, const pm_item &item, const pm_item *next, int tile, int heads) {
  const pm_item *of = tile + 1 < item.tile + item.num_tiles ? &item : next && !(next->flags & PM_FOLD) ? next : nullptr;
  if (!of) return {};
  int first = of == &item ? tile + 1 : of->tile;
  while (a.window && first + 1 < of->tile + of->num_tiles && !visible(a, *of, first, 0, heads).any) ++first;
  return {of, 0, first * PM_TILE, first * PM_TILE + tile_positions(*of, first)};
}

// Weights and weighted values of one tile for all rows, in s.tile_max, s.tile_sum and s.result.
template <bool DOT, class KV>
static void attend_tile(const pm_attention &a, const pm_item &item, const pm_item *next, int tile, int heads, Scratch &s) {
  const int head_dim = a.pool->head_dim, rows = item.num_tokens * heads, first = tile * PM_TILE;
  const int count = tile_positions(item, tile);
  const int width = (count + 15) / 16 * 16;
  pack_keys<DOT, KV>(a, item, first, count, {&item, 1, first, first + count}, s);
  gemm<DOT>(s.query, head_dim, s.packed, PM_TILE, s.scores, PM_TILE, rows, DOT ? head_dim / 2 : head_dim, width);
  pack_values<DOT, KV>(a, item, first, count, keys_of_next(a, item, next, tile, heads), s);
  if constexpr (sizeof(KV) == 1)
    for (int i = count; i < width; ++i) s.value_scales[i] = 0;
  for (int row = 0; row < rows; ++row) {
    const Visible v = visible(a, item, tile, row, heads);
    if (v.any)
      weigh<DOT, sizeof(KV) == 1>(s, row, width, v.low, v.high, a.scale, s.tile_max[row], s.tile_sum[row]);
    else  // the product below reads it, nothing reads what comes out
      __builtin_memset(s.weights + (int64_t)row * PM_TILE, 0, PM_TILE * 4);
  }
  gemm<DOT>(s.weights, PM_TILE, s.packed, head_dim, s.result, head_dim, rows, DOT ? (count + 1) / 2 : count, head_dim);
}

// Reads what the tiles of an item left, in their order.
static void fold(const pm_attention &a, const pm_item &item, int rows, Scratch &s) {
  const int head_dim = a.pool->head_dim;
  for (int tile = 0; tile < item.num_tiles; ++tile)
    for (int row = 0; row < rows; ++row) {
      const float *part = a.workspace + item.partials + ((int64_t)tile * rows + row) * (head_dim + 2);
      if (part[0] == -INF && part[1] == 0) continue;
      add_state(s.max[row], s.sum[row], s.out + (int64_t)row * head_dim, part[0], part[1], part + 2, head_dim);
    }
}

template <bool DOT, class KV, class Q>
static void attend_item(const pm_attention &a, const pm_item &item, const pm_item *next, uint8_t *scratch) {
  const int head_dim = a.pool->head_dim, heads = a.rows->num_heads / a.pool->num_kv_heads;
  const int rows = item.num_tokens * heads, first_head = item.kv_head * heads;
  Scratch s(scratch, item_rows(a), head_dim);
  for (int row = 0; row < rows; ++row) {
    s.max[row] = -INF;
    s.sum[row] = 0;
    if (item.flags & PM_RESUME) {
      const float *from = token_state(a, item_token(a, item, row / heads), first_head + row % heads);
      s.max[row] = from[0];
      s.sum[row] = from[1];
      __builtin_memcpy(s.out + (int64_t)row * head_dim, from + 2, head_dim * sizeof(float));
    }
  }
  if (item.flags & PM_FOLD) {
    fold(a, item, rows, s);
  } else {
    copy_queries<DOT, Q>(a, item, heads, s);
    for (int tile = item.tile; tile < item.tile + item.num_tiles; ++tile) {
      const bool needed = visible(a, item, tile, rows - 1, heads).any;  // the last row's window begins last
      const bool all_before = !needed && !visible(a, item, tile, 0, heads).any;
      if (!all_before) attend_tile<DOT, KV>(a, item, next, tile, heads, s);
      for (int row = 0; row < rows; ++row) {
        const bool any = !all_before && visible(a, item, tile, row, heads).any;
        const float *result = s.result + (int64_t)row * head_dim;
        if (item.flags & PM_PARTIAL)
          save_state(a.workspace + item.partials + ((int64_t)(tile - item.tile) * rows + row) * (head_dim + 2),
                     any ? s.tile_max[row] : -INF, any ? s.tile_sum[row] : 0, result, head_dim);
        else if (any)
          add_state(s.max[row], s.sum[row], s.out + (int64_t)row * head_dim, s.tile_max[row], s.tile_sum[row], result,
                    head_dim);
      }
    }
    if (item.flags & PM_PARTIAL) return;
  }
  for (int row = 0; row < rows; ++row) {
    const int token = item_token(a, item, row / heads), head = first_head + row % heads;
    const float *out = s.out + (int64_t)row * head_dim;
    if (item.flags & PM_SUSPEND)
      save_state(token_state(a, token, head), s.max[row], s.sum[row], out, head_dim);
    else
      write_out<Q>(a, token, head, s.sum[row], out);
  }
}

template <class Q>
INLINE void attend_as(const pm_attention &a, const pm_item &item, const pm_item *next, uint8_t *scratch) {
#if DOT_BF16 || defined(PM_EMULATE_DOT)
  constexpr bool dot = sizeof(Q) == 2;
#else
  constexpr bool dot = false;
#endif
  switch (a.pool->dtype) {
    case PM_F32: return attend_item<false, float, Q>(a, item, next, scratch);
    case PM_BF16: return attend_item<dot, bf16, Q>(a, item, next, scratch);
    default: return attend_item<dot, int8_t, Q>(a, item, next, scratch);
  }
}
static void attend(const pm_attention &a, const pm_item &item, const pm_item *next, uint8_t *scratch) {
  if (a.query_dtype == PM_F32)
    attend_as<float>(a, item, next, scratch);
  else
    attend_as<bf16>(a, item, next, scratch);
}
