#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(16, 3, true)
EXL3_INSTANTIATE(16, 5, true)
EXL3_INSTANTIATE(16, 7, true)
}  // namespace exl3
