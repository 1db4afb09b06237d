// The C interface: chooses the instruction set and shares work out among OpenMP's threads.
#include <omp.h>

#include <cstdlib>
#include <cstring>

#include "isa.h"

namespace {

const pm_isa_kernels *const ALL[] = {
#if PM_X86
    &pm_avx512bf16, &pm_avx512vnni, &pm_avx512, &pm_avx2,
#endif
    &pm_portable,
};

bool runs_here(const pm_isa_kernels *isa) {
#if PM_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == &pm_avx2) return avx2;
  if (isa == &pm_avx512) return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (isa == &pm_avx512vnni) return vnni;
  if (isa == &pm_avx512bf16) return vnni && __builtin_cpu_supports("avx512bf16");
#endif
  return isa == &pm_portable;
}

const pm_isa_kernels *best() {
  for (const pm_isa_kernels *isa : ALL)
    if (runs_here(isa)) return isa;
  return &pm_portable;
}

const pm_isa_kernels *isa = best();

// Rows below which waking the other threads costs more than it gains (a parallel region: 1 to 2 us).
const int64_t WORTH_SHARING = 8192;

template <class F>
void share_rows(int64_t rows, int64_t work, F run) {
  if (work < WORTH_SHARING || rows < 2) return run(0, rows);
#pragma omp parallel
  {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    const int64_t first = rows * i / n, end = rows * (i + 1) / n;
    if (first < end) run(first, end);
  }
}

}  // namespace

PM_EXPORT int32_t pm_attend(const pm_attention *a) {
  const pm_plan &plan = *a->plan;
  const int64_t size = (isa->scratch_bytes(*a) + 4095) / 4096 * 4096;
  const int threads = plan.num_items > 1 ? omp_get_max_threads() : 1;
  uint8_t *scratch = (uint8_t *)aligned_alloc(4096, size * threads);
  if (!scratch) return -1;
  // All KV heads of a row by one thread where that leaves enough pieces.
  const int heads = a->pool->num_kv_heads, many = 8 * threads * heads;
  const auto share = [&](int first, int end, uint8_t *own) {
    const int chunk = end - first < many ? 1 : heads;
#pragma omp for schedule(dynamic, chunk)
    for (int i = first; i < end; ++i) {
      const int next = (i + 1 - first) % chunk ? i + 1 : i + 1 + chunk * (threads - 1);
      isa->attend(*a, plan.items[i], next < end ? &plan.items[next] : nullptr, own);
    }
  };
#pragma omp parallel num_threads(threads)
  {
    uint8_t *own = scratch + size * omp_get_thread_num();
    share(0, plan.num_first, own);
    share(plan.num_first, plan.num_items, own);
  }
  free(scratch);
  return 0;
}

PM_EXPORT void pm_rope_store(const pm_rope *r) {
  const int64_t size = (int64_t)(r->num_heads + 2 * r->pool->num_kv_heads) * r->pool->head_dim;
  share_rows(r->num_tokens, r->num_tokens * size, [&](int64_t first, int64_t end) { isa->rope_store(*r, first, end); });
}

PM_EXPORT void pm_rms_norm(const void *x, int64_t x_stride, const void *weight, void *out, int64_t rows, int64_t size,
                           float eps, int32_t dtype) {
  share_rows(rows, rows * size, [&](int64_t first, int64_t end) {
    isa->rms_norm(x, x_stride, weight, out, first, end, size, eps, dtype);
  });
}

PM_EXPORT void pm_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int32_t dtype) {
  share_rows(rows, rows * size * 2, [&](int64_t first, int64_t end) {
    isa->silu_mul(gate_up, out, first, end, size, dtype);
  });
}

PM_EXPORT int32_t pm_linear_forward(const pm_linear *l) {
  const int64_t panels = (l->out_features + PM_PANEL - 1) / PM_PANEL;
  const int64_t inputs = l->dtype == PM_F32 || !isa->linear_inputs ? 0 : (l->rows * l->in_features + 15) / 16 * 16;
  const int64_t own = (l->in_features + 1 + PM_LINEAR_PANELS * PM_LINEAR_ROWS) * PM_PANEL;
  const int threads = l->in_features * l->out_features < WORTH_SHARING ? 1 : omp_get_max_threads();
  float *memory = (float *)aligned_alloc(64, (inputs + own * threads) * sizeof(float));
  if (!memory) return -1;
  const float *x = inputs ? memory : (const float *)l->x;
  const int64_t stride = inputs ? l->in_features : l->x_stride;
#pragma omp parallel num_threads(threads)
  {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    if (inputs) isa->linear_inputs(*l, memory, l->rows * i / n, l->rows * (i + 1) / n);
#pragma omp barrier
    isa->linear(*l, x, stride, memory + inputs + own * i, panels * i / n, panels * (i + 1) / n);
  }
  free(memory);
  return 0;
}

PM_EXPORT void pm_pack_linear(const void *dense, void *packed, int64_t in_features, int64_t out_features) {
  const int64_t panels = (out_features + PM_PANEL - 1) / PM_PANEL, pairs = (in_features + 1) / 2;
  const uint16_t *from = (const uint16_t *)dense;
#pragma omp parallel for
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t i = 0; i < 2 * pairs; ++i)
      for (int64_t j = 0; j < PM_PANEL; ++j) {
        const int64_t row = p * PM_PANEL + j;
        ((uint16_t *)packed)[((p * pairs + i / 2) * PM_PANEL + j) * 2 + i % 2] =
            row < out_features && i < in_features ? from[row * in_features + i] : 0;
      }
}

PM_EXPORT int32_t pm_quantised_forward(const pm_quantised *q) {
  const int64_t panels = (q->out_features + PM_PANEL - 1) / PM_PANEL;
  const int64_t groups = (q->in_features + PM_GROUP - 1) / PM_GROUP;
  const int64_t stride = (q->in_features + 63) / 64 * 64, own = PM_LINEAR_PANELS * PM_LINEAR_ROWS * PM_PANEL;
  const int threads = q->in_features * q->out_features < WORTH_SHARING ? 1 : omp_get_max_threads();
  const int64_t scales = (q->rows * groups + 15) / 16 * 16;
  float *memory = (float *)aligned_alloc(64, q->rows * stride + (3 * scales + own * threads) * sizeof(float));
  if (!memory) return -1;
  float *room = memory + 3 * scales;
  const pm_int8_rows x = {(int8_t *)(room + own * threads), memory, (int32_t *)memory + scales, memory + 2 * scales,
                          stride, groups};
#pragma omp parallel num_threads(threads)
  {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    isa->quantise_inputs(*q, x, q->rows * i / n, q->rows * (i + 1) / n);
#pragma omp barrier
    isa->quantised(*q, x, room + own * i, panels * i / n, panels * (i + 1) / n);
  }
  free(memory);
  return 0;
}

PM_EXPORT int32_t pm_abi(void) { return PM_ABI; }
PM_EXPORT const char *pm_isa(void) { return isa->name; }
PM_EXPORT int32_t pm_use_isa(const char *name) {
  for (const pm_isa_kernels *candidate : ALL)
    if (!strcmp(candidate->name, name) && runs_here(candidate)) {
      isa = candidate;
      return 0;
    }
  return -1;
}
PM_EXPORT int32_t pm_num_threads(void) { return omp_get_max_threads(); }
