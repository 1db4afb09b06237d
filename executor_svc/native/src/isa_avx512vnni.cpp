// The kernels for CPUs with avx512f, avx512bw, avx512vl, avx512dq, avx512vnni, avx2, fma.
#include "kernels.h"
#if PM_X86
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
#include <immintrin.h>

#define VW 16
#define DOT_BF16 0
#define DOT_INT8 3
#define ISA_KERNELS pm_avx512vnni
#define ISA_NAME "avx512vnni"
#include "isa_body.h"
#endif
