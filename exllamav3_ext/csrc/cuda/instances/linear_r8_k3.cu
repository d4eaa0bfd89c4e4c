#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(8, 6, false)
EXL3_INSTANTIATE(8, 6, true)
}  // namespace exl3
