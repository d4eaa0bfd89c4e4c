#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(16, 16, false)
EXL3_INSTANTIATE(16, 16, true)
}  // namespace exl3
