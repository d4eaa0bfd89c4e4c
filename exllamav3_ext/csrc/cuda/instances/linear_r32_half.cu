#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(32, 3, true)
EXL3_INSTANTIATE(32, 5, true)
EXL3_INSTANTIATE(32, 7, true)
}  // namespace exl3
