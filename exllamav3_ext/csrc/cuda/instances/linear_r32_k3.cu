#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(32, 6, false)
EXL3_INSTANTIATE(32, 6, true)
}  // namespace exl3
