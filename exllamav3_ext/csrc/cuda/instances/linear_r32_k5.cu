#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(32, 10, false)
EXL3_INSTANTIATE(32, 10, true)
}  // namespace exl3
