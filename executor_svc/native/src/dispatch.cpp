// The C interface: chooses the instruction set and shares work out among OpenMP's threads.
#include <omp.h>

#include <cstdlib>
#include <cstring>

#include "isa.h"
#include "work.h"

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

// Work below which the first thread alone is as fast as all.
const int64_t WORTH_SHARING = 8192;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Calls run(first, end) for this member's share of `count`.
template <class F>
void share(int64_t count, const Member &m, bool worth_it, F run) {
  const int64_t n = worth_it ? m.team.size : 1;
  if (m.rank >= n) return;
  const int64_t first = count * m.rank / n, end = count * (m.rank + 1) / n;
  if (first < end) run(first, end);
}

// Items in order, `chunk` at a time to whoever is free; run(item, what this member is likely to do next, -1: nothing).
template <class F>
void share_items(int first, int end, int chunk, std::atomic<int32_t> &taken, const Member &m, F run) {
  for (;;) {
    const int from = first + taken.fetch_add(chunk, std::memory_order_relaxed);
    if (from >= end) return;
    const int to = from + chunk < end ? from + chunk : end, after = to + chunk * (m.team.size - 1);
    for (int i = from; i < to; ++i) run(i, i + 1 < to ? i + 1 : after < end ? after : -1);
  }
}

struct LinearRoom {
  int64_t inputs, own;  // floats: inputs of all rows, where they are not read as they are; for each thread
  explicit LinearRoom(const pm_linear &l)
      : inputs(l.dtype == PM_F32 || !isa->linear_inputs ? 0 : round_up(l.rows * l.in_features, 16)),
        own((l.in_features + 1 + PM_LINEAR_PANELS * PM_LINEAR_ROWS) * PM_PANEL) {}
};

struct QuantisedRoom {
  int64_t groups, stride, scales, own;  // floats but for `stride`, which is bytes of a row of inputs
  explicit QuantisedRoom(const pm_quantised &q)
      : groups((q.in_features + PM_GROUP - 1) / PM_GROUP),
        stride(round_up(q.in_features, 64)),
        scales(round_up(q.rows * groups, 16)),
        own(PM_LINEAR_PANELS * PM_LINEAR_ROWS * PM_PANEL) {}
};

int64_t scratch_bytes(const pm_attention &a) { return round_up(isa->scratch_bytes(a), 4096); }
int64_t num_panels(int64_t out_features) { return (out_features + PM_PANEL - 1) / PM_PANEL; }

// One kernel, by all of OpenMP's threads or by one. 0: fine; -1: no memory.
template <class F>
int32_t alone(int threads, int64_t bytes, F run) {
  uint8_t *room = bytes ? (uint8_t *)aligned_alloc(64, round_up(bytes, 64)) : nullptr;
  if (bytes && !room) return -1;
  Team team;
  std::atomic<int32_t> taken[2] = {};
  if (threads == 1) {
    run(Member{team, 0, room, taken});
  } else {
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      team.size = omp_get_num_threads();
      run(Member{team, omp_get_thread_num(), room, taken});
    }
  }
  free(room);
  return 0;
}
int threads_for(int64_t count, int64_t work) {
  return count < 2 || work < WORTH_SHARING ? 1 : omp_get_max_threads();
}

}  // namespace

int64_t room_bytes(const pm_attention &a, int threads) { return scratch_bytes(a) * threads; }
int64_t room_bytes(const pm_linear &l, int threads) {
  const LinearRoom room(l);
  return (room.inputs + room.own * threads) * sizeof(float);
}
int64_t room_bytes(const pm_quantised &q, int threads) {
  const QuantisedRoom room(q);
  return q.rows * room.stride + (3 * room.scales + room.own * threads) * sizeof(float);
}

void attend(const pm_attention &a, const Member &m) {
  const pm_plan &plan = *a.plan;
  uint8_t *own = m.room + scratch_bytes(a) * m.rank;
  const auto run = [&](int i, int next) {
    isa->attend(a, plan.items[i], next < 0 ? nullptr : &plan.items[next], own);
  };
  // All KV heads of a row by one thread where that leaves enough pieces.
  const int heads = a.pool->num_kv_heads, many = 8 * m.team.size * heads;
  const auto chunk = [&](int count) { return count < many ? 1 : heads; };
  if (plan.num_first) {
    share_items(0, plan.num_first, chunk(plan.num_first), m.taken[0], m, run);
    m.team.meet();
  }
  share_items(plan.num_first, plan.num_items, chunk(plan.num_items - plan.num_first), m.taken[1], m, run);
}

void rope_store(const pm_rope &r, const Member &m) {
  const int64_t size = (int64_t)(r.num_heads + 2 * r.pool->num_kv_heads) * r.pool->head_dim;
  share(r.num_tokens, m, r.num_tokens * size >= WORTH_SHARING,
        [&](int64_t first, int64_t end) { isa->rope_store(r, first, end); });
}

void rms_norm(const pm_norm &n, int64_t x_stride, int64_t rows, const Member &m) {
  share(rows, m, rows * n.size >= WORTH_SHARING, [&](int64_t first, int64_t end) {
    isa->rms_norm(n.x, x_stride, n.weight, n.out, first, end, n.size, n.eps, n.dtype);
  });
}

void silu_mul(const pm_silu &s, int64_t rows, const Member &m) {
  share(rows, m, rows * s.size * 2 >= WORTH_SHARING,
        [&](int64_t first, int64_t end) { isa->silu_mul(s.gate_up, s.out, first, end, s.size, s.dtype); });
}

void linear(const pm_linear &l, const Member &m) {
  const LinearRoom room(l);
  const bool worth_it = l.in_features * l.out_features >= WORTH_SHARING;
  float *memory = (float *)m.room, *own = memory + room.inputs + room.own * m.rank;
  if (room.inputs) {
    share(l.rows, m, worth_it, [&](int64_t first, int64_t end) { isa->linear_inputs(l, memory, first, end); });
    m.team.meet();
  }
  const float *x = room.inputs ? memory : (const float *)l.x;
  share(num_panels(l.out_features), m, worth_it, [&](int64_t first, int64_t end) {
    isa->linear(l, x, room.inputs ? l.in_features : l.x_stride, own, first, end);
  });
}

void quantised(const pm_quantised &q, const Member &m) {
  const QuantisedRoom room(q);
  const bool worth_it = q.in_features * q.out_features >= WORTH_SHARING;
  float *memory = (float *)m.room, *results = memory + 3 * room.scales;
  const pm_int8_rows x = {(int8_t *)(results + room.own * m.team.size), memory, (int32_t *)memory + room.scales,
                          memory + 2 * room.scales, room.stride, room.groups};
  share(q.rows, m, worth_it, [&](int64_t first, int64_t end) { isa->quantise_inputs(q, x, first, end); });
  m.team.meet();
  share(num_panels(q.out_features), m, worth_it,
        [&](int64_t first, int64_t end) { isa->quantised(q, x, results + room.own * m.rank, first, end); });
}

PM_EXPORT int32_t pm_attend(const pm_attention *a) {
  const int threads = a->plan->num_items > 1 ? omp_get_max_threads() : 1;
  return alone(threads, room_bytes(*a, threads), [&](const Member &m) { attend(*a, m); });
}

PM_EXPORT void pm_rope_store(const pm_rope *r) {
  const int64_t size = (int64_t)(r->num_heads + 2 * r->pool->num_kv_heads) * r->pool->head_dim;
  alone(threads_for(r->num_tokens, r->num_tokens * size), 0, [&](const Member &m) { rope_store(*r, m); });
}

PM_EXPORT void pm_rms_norm(const void *x, int64_t x_stride, const void *weight, void *out, int64_t rows, int64_t size,
                           float eps, int32_t dtype) {
  const pm_norm n = {x, weight, out, size, dtype, eps};
  alone(threads_for(rows, rows * size), 0, [&](const Member &m) { rms_norm(n, x_stride, rows, m); });
}

PM_EXPORT void pm_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int32_t dtype) {
  const pm_silu s = {gate_up, out, size, dtype};
  alone(threads_for(rows, rows * size * 2), 0, [&](const Member &m) { silu_mul(s, rows, m); });
}

PM_EXPORT int32_t pm_linear_forward(const pm_linear *l) {
  const int threads = threads_for(num_panels(l->out_features), l->in_features * l->out_features);
  return alone(threads, room_bytes(*l, threads), [&](const Member &m) { linear(*l, m); });
}

PM_EXPORT int32_t pm_quantised_forward(const pm_quantised *q) {
  const int threads = threads_for(num_panels(q->out_features), q->in_features * q->out_features);
  return alone(threads, room_bytes(*q, threads), [&](const Member &m) { quantised(*q, m); });
}

PM_EXPORT void pm_pack_linear(const void *dense, void *packed, int64_t in_features, int64_t out_features) {
  const int64_t panels = num_panels(out_features), pairs = (in_features + 1) / 2;
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
