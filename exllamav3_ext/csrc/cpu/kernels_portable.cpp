// The CPU kernels compiled for portable; see kernels.h.

#include "cpu/decode_portable.h"
#include "cpu/kernels_impl.h"

namespace exl3 {
constexpr Kernels kernels_portable = make_kernels();
}
