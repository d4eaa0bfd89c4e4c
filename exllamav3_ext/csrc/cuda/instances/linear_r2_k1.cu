#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(2, 2, false)
EXL3_INSTANTIATE(2, 2, true)
}  // namespace exl3
