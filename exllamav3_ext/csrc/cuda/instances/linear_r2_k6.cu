#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(2, 12, false)
EXL3_INSTANTIATE(2, 12, true)
}  // namespace exl3
