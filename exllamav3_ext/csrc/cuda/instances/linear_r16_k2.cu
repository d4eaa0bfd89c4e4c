#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(16, 4, false)
EXL3_INSTANTIATE(16, 4, true)
}  // namespace exl3
