// The CPU kernels compiled for avx512; see kernels.h.

#include "cpu/decode_avx512.h"
#include "cpu/kernels_impl.h"

namespace exl3 {
constexpr Kernels kernels_avx512 = make_kernels();
}
