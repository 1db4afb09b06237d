// Everything that is compiled once per instruction set, in a namespace of its own: the linker must not take one set's
// copy of a function for another's.
#include "isa.h"

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

namespace JOIN(ISA_KERNELS, _impl) {
#include "simd.h"

#include "gemm.h"

#include "attention.h"

#include "elementwise.h"

#include "linear.h"

#include "integers.h"

#include "quantised.h"
}  // namespace

const pm_isa_kernels ISA_KERNELS = {
    ISA_NAME,
    JOIN(ISA_KERNELS, _impl)::attend,
    JOIN(ISA_KERNELS, _impl)::scratch_bytes,
    JOIN(ISA_KERNELS, _impl)::rope_store,
    JOIN(ISA_KERNELS, _impl)::rms_norm,
    JOIN(ISA_KERNELS, _impl)::silu_mul,
    JOIN(ISA_KERNELS, _impl)::DOT_LINEAR ? nullptr : JOIN(ISA_KERNELS, _impl)::linear_inputs,
    JOIN(ISA_KERNELS, _impl)::linear,
    JOIN(ISA_KERNELS, _impl)::quantise_inputs,
    JOIN(ISA_KERNELS, _impl)::quantised,
};
