// The kernels for CPUs with avx2, fma, f16c.
#include "kernels.h"
#if PM_X86
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#define VW 8
#define DOT_BF16 0
#define DOT_INT8 1
#define ISA_KERNELS pm_avx2
#define ISA_NAME "avx2"
#include "isa_body.h"
#endif
