// Many kernels in one call; see sequence.h.
#include <omp.h>

#include <cstdlib>
#include <new>

#include "work.h"

namespace {

pm_linear linear_of(const pm_call &call, const pm_step &step) {
  pm_linear l = *(const pm_linear *)call.arguments;
  l.rows = step.rows;
  return l;
}
pm_quantised quantised_of(const pm_call &call, const pm_step &step) {
  pm_quantised q = *(const pm_quantised *)call.arguments;
  q.rows = step.rows;
  return q;
}
const pm_attention &attention_of(const pm_call &call, const pm_step &step) {
  return call.windowed ? *step.windowed : *step.whole;
}

int64_t room_bytes(const pm_call &call, const pm_step &step, int threads) {
  switch (call.kind) {
    case PM_CALL_LINEAR: return room_bytes(linear_of(call, step), threads);
    case PM_CALL_QUANTISED: return room_bytes(quantised_of(call, step), threads);
    case PM_CALL_ATTEND: return room_bytes(attention_of(call, step), threads);
    default: return 0;
  }
}

void run(const pm_call &call, const pm_step &step, const Member &m) {
  switch (call.kind) {
    case PM_CALL_NORM: {
      const pm_norm &n = *(const pm_norm *)call.arguments;
      return rms_norm(n, n.size, step.rows, m);
    }
    case PM_CALL_LINEAR: return linear(linear_of(call, step), m);
    case PM_CALL_QUANTISED: return quantised(quantised_of(call, step), m);
    case PM_CALL_SILU: return silu_mul(*(const pm_silu *)call.arguments, step.rows, m);
    case PM_CALL_ROPE: {
      pm_rope r = *step.rope;
      r.layer = call.layer;
      if (call.arguments) {
        const pm_head_norms &norms = *(const pm_head_norms *)call.arguments;
        r.query_norm = norms.query, r.key_norm = norms.key, r.eps = norms.eps;
      }
      return rope_store(r, m);
    }
    case PM_CALL_ATTEND: {
      pm_attention a = attention_of(call, step);
      a.layer = call.layer;
      return attend(a, m);
    }
  }
}

}  // namespace

PM_EXPORT int32_t pm_run(const pm_call *calls, int32_t num_calls, const pm_step *step) {
  const int threads = omp_get_max_threads();
  int64_t bytes = 0;
  for (int32_t i = 0; i < num_calls; ++i) {
    const int64_t needed = room_bytes(calls[i], *step, threads);
    bytes = needed > bytes ? needed : bytes;
  }
  bytes = (bytes + 63) / 64 * 64;
  const int64_t taken_bytes = (int64_t)num_calls * 2 * sizeof(std::atomic<int32_t>);
  uint8_t *room = (uint8_t *)aligned_alloc(64, bytes + (taken_bytes + 63) / 64 * 64);
  if (!room) return -1;
  std::atomic<int32_t> *taken = (std::atomic<int32_t> *)(room + bytes);
  for (int32_t i = 0; i < 2 * num_calls; ++i) new (taken + i) std::atomic<int32_t>(0);
  Team team;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    team.size = omp_get_num_threads();
    const int rank = omp_get_thread_num();
    for (int32_t i = 0; i < num_calls; ++i) {
      run(calls[i], *step, Member{team, rank, room, taken + 2 * i});
      team.meet();
    }
  }
  free(room);
  return 0;
}
