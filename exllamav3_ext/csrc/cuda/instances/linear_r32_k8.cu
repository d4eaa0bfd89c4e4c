#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(32, 16, false)
EXL3_INSTANTIATE(32, 16, true)
}  // namespace exl3
