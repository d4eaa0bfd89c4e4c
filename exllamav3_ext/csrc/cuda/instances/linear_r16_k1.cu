#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(16, 2, false)
EXL3_INSTANTIATE(16, 2, true)
}  // namespace exl3
