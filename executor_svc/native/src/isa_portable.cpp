// The kernels for any CPU: vectors of 4 floats, in whatever instructions the compiler may assume.
// Tests compile it for wider vectors too, and with the bf16 products of other CPUs emulated.
#ifndef VW
#define VW 4
#endif
#define DOT_BF16 0
#define DOT_INT8 0
#define ISA_KERNELS pm_portable
#define ISA_NAME "portable"
#include "isa_body.h"
