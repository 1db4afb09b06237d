// The C interface of the native kernels. Python calls it through ctypes (`executor_svc/native/library.py` mirrors the
// structures; `pm_abi` tells whether both are of the same version).
//
// All memory belongs to the caller. Nothing here allocates what outlives a call, or knows torch; between calls stay the
// instruction set in use and how long threads wait (team.h).
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef PM_ABI
#define PM_ABI 5
#endif

// Whether the instruction sets of x86 are compiled beside the portable kernels. Tests build without.
#ifndef PM_X86
#if defined(__x86_64__)
#define PM_X86 1
#else
#define PM_X86 0
#endif
#endif

#define PM_EXPORT extern "C" __attribute__((visibility("default")))

enum { PM_F32 = 0, PM_BF16 = 1, PM_I8 = 2 };

// Positions whose keys are scored at once. Contexts are cut at multiples of it, whatever the batch looks like: each
// piece is computed by itself and added to what came before, in order. So no result depends on how work was divided.
enum { PM_TILE = 128 };
// Query rows (tokens times query heads per KV head) of one piece of work, unless one token has more heads than this.
enum { PM_ITEM_ROWS = 96 };

// A paged pool, block-major: values [num_layers][2][num_kv_heads][block_size][head_dim] of `dtype` in each block, and for
// PM_I8 behind them at `scales_offset` bytes the scales [num_layers][2][num_kv_heads][block_size] in bf16.
struct pm_pool {
  uint8_t *base;
  int64_t bytes_per_block;
  int64_t scales_offset;
  int32_t num_layers, num_kv_heads, block_size, head_dim, dtype;
};

// The rows of one step. Row i has the tokens query_starts[i] .. query_starts[i + 1] - 1, the last ones of a context of
// context_lens[i] positions that lie in the blocks tables[i * table_width ...].
struct pm_rows {
  int32_t num_rows, table_width, num_heads;
  const int32_t *query_starts;
  const int32_t *context_lens;
  const int32_t *tables;
};

// Tokens that see the same first positions: those are read once for all of them. Group i has the tokens
// tokens[starts[i]] .. tokens[starts[i + 1] - 1] and shares `lens[i]` positions, a multiple of PM_TILE, of row rows[i].
// shared_lens has for each row how many of its first positions are taken care of here.
struct pm_groups {
  int32_t num_groups;
  const int32_t *starts, *tokens, *lens, *rows, *shared_lens;
};

// One piece of work: some tokens, one KV head, some tiles.
struct pm_item {
  int32_t row, kv_head;
  int32_t token, num_tokens;  // the first one's index, or with PM_GROUPED the place in pm_groups.tokens
  int32_t tile, num_tiles;
  int32_t position;  // of the first token in its context, the others follow; with PM_GROUPED all tiles are visible
  int32_t flags;
  int64_t partials;  // with PM_PARTIAL and PM_FOLD: where in the workspace, in floats, the tiles' results are
  int64_t cost;
};

enum {
  PM_GROUPED = 1,   // tokens are listed
  PM_RESUME = 2,    // begin with the tokens' states instead of nothing
  PM_SUSPEND = 4,   // leave the tokens' states instead of the result
  PM_PARTIAL = 8,   // leave each tile's result
  PM_FOLD = 16,     // compute nothing, put together what PM_PARTIAL items left
};

// What `pm_plan_attention` makes: items [0, num_first) come before all others.
struct pm_plan {
  pm_item *items;
  int32_t capacity;
  int32_t num_first, num_items;
  int64_t workspace_floats;  // states of all tokens first, then partials
};

struct pm_attention {
  const pm_pool *pool;
  const pm_rows *rows;
  const pm_groups *groups;
  const pm_plan *plan;
  float *workspace;
  const void *query;      // (num_tokens, num_heads, head_dim) of query_dtype, tokens query_stride elements apart
  void *out;              // (num_tokens, num_heads * head_dim) of query_dtype
  int64_t query_stride;
  int32_t num_tokens, query_dtype, layer;
  int32_t window;         // 0: none
  float scale;
};

// Normalise (where weights are given), rotate and store: heads (num_tokens, num_heads + 2 * num_kv_heads, head_dim) of
// `dtype`, tokens `stride` elements apart: queries, keys, values. Queries are rotated in place, keys and values go to
// `slots` (block * block_size + offset) of the pool; what lies in `heads` of them afterwards is undefined.
struct pm_rope {
  const pm_pool *pool;
  void *heads;
  int64_t stride;
  const float *cos, *sin;     // (positions, head_dim / 2)
  const int64_t *positions;   // (num_tokens,)
  const int64_t *slots;       // (num_tokens,)
  const void *query_norm, *key_norm;  // (head_dim,) of `dtype`, or null
  float eps;
  int32_t num_tokens, num_heads, dtype, layer;
};

// 0: fine; negative: the capacity of the plan is too small.
PM_EXPORT int32_t pm_plan_attention(const pm_pool *, const pm_rows *, const pm_groups *, int32_t num_threads, pm_plan *);
// 0: fine; negative: no memory for the threads' buffers.
PM_EXPORT int32_t pm_attend(const pm_attention *);
PM_EXPORT void pm_rope_store(const pm_rope *);
// out = x / rms(x) * weight, (rows, size) with rows x_stride elements apart.
PM_EXPORT void pm_rms_norm(const void *x, int64_t x_stride, const void *weight, void *out, int64_t rows, int64_t size,
                           float eps, int32_t dtype);
// out = silu(gate) * up, (rows, size) each; gate and up lie side by side, rows 2 * size elements apart.
PM_EXPORT void pm_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int32_t dtype);

// y = x W + bias + residual: x (rows, in_features) and out (rows, out_features) of `dtype`, rows of x x_stride elements
// apart; weight as pm_pack_linear makes it, bias (out_features,) bf16 or null, residual like out or null.
struct pm_linear {
  const void *x, *weight, *bias, *residual;
  void *out;
  int64_t x_stride, rows, in_features, out_features;
  int32_t dtype;
};
// 0: fine; negative: no memory for the threads' buffers.
PM_EXPORT int32_t pm_linear_forward(const pm_linear *);
// dense (out_features, in_features) bf16 to packed, which has room for out_features rounded up to a multiple of 16 times
// in_features rounded up to an even number: [panel][pair of inputs][16 outputs][2].
PM_EXPORT void pm_pack_linear(const void *dense, void *packed, int64_t in_features, int64_t out_features);

// Weights in integers, with one scale per output (PM_INT8_ROWS) or one per output and group of PM_GROUP inputs. Inputs
// become int8 on the way, each group of a row by itself: -127..127 times the largest magnitude / 127, ties to even. Sums
// of a group's products are exact; groups are added in float, in order.
enum { PM_INT8_ROWS = 0, PM_INT8_GROUPS = 1, PM_INT4_GROUPS = 2 };
enum { PM_GROUP = 32 };

// y = x W + bias + residual. Panels have 16 outputs; those behind out_features are zero.
struct pm_quantised {
  const void *x, *residual;  // as in pm_linear
  void *out;
  // [panel][group][word][16][4] bytes, the last group filled up with zeros. Of int8 a group has 8 words, and word i has
  // its inputs 4 * i ...; of 4 bits it has 4, and the low half of byte j of word i is input 4 * i + j, the high half the
  // one 16 further; 0..15.
  const uint8_t *values;
  const void *scales;     // PM_INT8_ROWS: float [panel][16]; else half precision [panel][group][16], finite
  const void *mins;       // PM_INT4_GROUPS: half precision like scales, added to number times scale; null: -8 scales
  const float *bias;      // (out_features,) or null
  int64_t x_stride, rows, in_features, out_features;  // in_features: whole groups but for PM_INT8_ROWS
  int32_t dtype, format;  // dtype: of x, residual and out
};
// 0: fine; negative: no memory for the quantised inputs.
PM_EXPORT int32_t pm_quantised_forward(const pm_quantised *);

PM_EXPORT int32_t pm_abi(void);
// The instruction set in use, and the choice of another for tests: 0 if this CPU has it, else negative.
PM_EXPORT const char *pm_isa(void);
PM_EXPORT int32_t pm_use_isa(const char *name);
PM_EXPORT int32_t pm_num_threads(void);
