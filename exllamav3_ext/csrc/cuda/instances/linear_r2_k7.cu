#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(2, 14, false)
EXL3_INSTANTIATE(2, 14, true)
}  // namespace exl3
