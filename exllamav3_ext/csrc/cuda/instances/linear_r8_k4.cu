#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(8, 8, false)
EXL3_INSTANTIATE(8, 8, true)
}  // namespace exl3
