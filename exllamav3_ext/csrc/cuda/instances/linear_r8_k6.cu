#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(8, 12, false)
EXL3_INSTANTIATE(8, 12, true)
}  // namespace exl3
