// Kernels as the members of a team do them together: each member calls the function with the same arguments, and when
// all have met after it the result is there. `dispatch.cpp` has them.
#pragma once

#include <atomic>

#include "sequence.h"
#include "team.h"

struct Member {
  Team &team;
  int rank;
  uint8_t *room;                // the team's: room_bytes(...) of what is computed, aligned to 64 bytes
  std::atomic<int32_t> *taken;  // of two shared loops, 0 at the beginning
};

int64_t room_bytes(const pm_attention &, int threads);
int64_t room_bytes(const pm_linear &, int threads);
int64_t room_bytes(const pm_quantised &, int threads);

void attend(const pm_attention &, const Member &);
void rope_store(const pm_rope &, const Member &);
// With rows x_stride elements apart.
void rms_norm(const pm_norm &, int64_t x_stride, int64_t rows, const Member &);
void silu_mul(const pm_silu &, int64_t rows, const Member &);
void linear(const pm_linear &, const Member &);
void quantised(const pm_quantised &, const Member &);
