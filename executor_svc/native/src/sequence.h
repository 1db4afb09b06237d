// Many kernels in one call: what a step does between its embeddings and its logits. A call from Python costs some 25 us
// with the arrays and structures that it needs; a decode step of a small model makes three hundred.
#pragma once

#include "kernels.h"

enum { PM_CALL_NORM = 0, PM_CALL_LINEAR = 1, PM_CALL_QUANTISED = 2, PM_CALL_SILU = 3, PM_CALL_ROPE = 4, PM_CALL_ATTEND = 5 };

// As the arguments of pm_rms_norm, rows one behind the other.
struct pm_norm {
  const void *x, *weight;
  void *out;
  int64_t size;
  int32_t dtype;
  float eps;
};

// As the arguments of pm_silu_mul.
struct pm_silu {
  const void *gate_up;
  void *out;
  int64_t size;
  int32_t dtype;
};

// Norms of query and key heads, as in pm_rope.
struct pm_head_norms {
  const void *query, *key;
  float eps;
};

// `arguments`: pm_norm, pm_linear, pm_quantised or pm_silu; for PM_CALL_ROPE pm_head_norms or null; for PM_CALL_ATTEND
// null. The number of rows in them is not looked at.
struct pm_call {
  const void *arguments;
  int32_t kind;
  int32_t layer;     // of PM_CALL_ROPE and PM_CALL_ATTEND
  int32_t windowed;  // of PM_CALL_ATTEND: which of the two in the step
};

// What differs from step to step. `rope`, `whole` and `windowed` are complete but for layer and norms; one that no call
// asks for may be null.
struct pm_step {
  int64_t rows;
  const pm_rope *rope;
  const pm_attention *whole, *windowed;
};

// Runs them in order. 0: fine; negative: no memory for the threads' buffers.
PM_EXPORT int32_t pm_run(const pm_call *calls, int32_t num_calls, const pm_step *step);
