// What one instruction set offers; `dispatch.cpp` has a table of them.
#pragma once

#include "kernels.h"

// Quantised inputs: `values` (rows, stride), in each row groups of numbers padded with zeros to `stride`; per row and group
// a scale, what sums of products with int8 weights begin with, and scale times the sum of the numbers.
struct pm_int8_rows {
  int8_t *values;
  float *scales;
  int32_t *starts;
  float *scaled_sums;
  int64_t stride, groups;
};

struct pm_isa_kernels {
  const char *name;
  // One item; `next`: what this thread is likely to do then, or null. `scratch` is the thread's own, scratch_bytes(...) long and aligned to 64 bytes.
  void (*attend)(const pm_attention &, const pm_item &, const pm_item *next, uint8_t *scratch);
  int64_t (*scratch_bytes)(const pm_attention &);
  void (*rope_store)(const pm_rope &, int64_t first, int64_t end);
  void (*rms_norm)(const void *x, int64_t x_stride, const void *weight, void *out, int64_t first, int64_t end,
                   int64_t size, float eps, int32_t dtype);
  void (*silu_mul)(const void *gate_up, void *out, int64_t first, int64_t end, int64_t size, int32_t dtype);
  // Null where `linear` reads inputs of bf16 from where they are.
  void (*linear_inputs)(const pm_linear &, float *x, int64_t first, int64_t end);
  void (*linear)(const pm_linear &, const float *x, int64_t stride, float *room, int64_t first, int64_t end);
  void (*quantise_inputs)(const pm_quantised &, const pm_int8_rows &, int64_t first, int64_t end);
  void (*quantised)(const pm_quantised &, const pm_int8_rows &, float *room, int64_t first, int64_t end);
};
// Outputs of a panel of weights; rows, and panels, that a thread has results of at once.
enum { PM_PANEL = 16, PM_LINEAR_ROWS = 192, PM_LINEAR_PANELS = 4 };

extern const pm_isa_kernels pm_portable;
#if PM_X86
extern const pm_isa_kernels pm_avx2, pm_avx512, pm_avx512vnni, pm_avx512bf16;
#endif
