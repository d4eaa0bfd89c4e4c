#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(8, 3, true)
EXL3_INSTANTIATE(8, 5, true)
EXL3_INSTANTIATE(8, 7, true)
}  // namespace exl3
