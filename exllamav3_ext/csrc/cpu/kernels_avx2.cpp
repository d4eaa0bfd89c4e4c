// The CPU kernels compiled for avx2; see kernels.h.

#include "cpu/decode_avx2.h"
#include "cpu/kernels_impl.h"

namespace exl3 {
constexpr Kernels kernels_avx2 = make_kernels();
}
