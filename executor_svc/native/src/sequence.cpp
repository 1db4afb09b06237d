// Many kernels in one call; see sequence.h.
#include "sequence.h"

namespace {

int32_t run(const pm_call &call, const pm_step &step) {
  switch (call.kind) {
    case PM_CALL_NORM: {
      const pm_norm &n = *(const pm_norm *)call.arguments;
      pm_rms_norm(n.x, n.size, n.weight, n.out, step.rows, n.size, n.eps, n.dtype);
      return 0;
    }
    case PM_CALL_LINEAR: {
      pm_linear l = *(const pm_linear *)call.arguments;
      l.rows = step.rows;
      return pm_linear_forward(&l);
    }
    case PM_CALL_QUANTISED: {
      pm_quantised q = *(const pm_quantised *)call.arguments;
      q.rows = step.rows;
      return pm_quantised_forward(&q);
    }
    case PM_CALL_SILU: {
      const pm_silu &s = *(const pm_silu *)call.arguments;
      pm_silu_mul(s.gate_up, s.out, step.rows, s.size, s.dtype);
      return 0;
    }
    case PM_CALL_ROPE: {
      pm_rope r = *step.rope;
      r.layer = call.layer;
      if (call.arguments) {
        const pm_head_norms &norms = *(const pm_head_norms *)call.arguments;
        r.query_norm = norms.query, r.key_norm = norms.key, r.eps = norms.eps;
      }
      pm_rope_store(&r);
      return 0;
    }
    case PM_CALL_ATTEND: {
      pm_attention a = call.windowed ? *step.windowed : *step.whole;
      a.layer = call.layer;
      return pm_attend(&a);
    }
  }
  return -1;
}

}  // namespace

PM_EXPORT int32_t pm_run(const pm_call *calls, int32_t num_calls, const pm_step *step) {
  for (int32_t i = 0; i < num_calls; ++i) {
    const int32_t done = run(calls[i], *step);
    if (done != 0) return done;
  }
  return 0;
}
