#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(2, 3, true)
EXL3_INSTANTIATE(2, 5, true)
EXL3_INSTANTIATE(2, 7, true)
}  // namespace exl3
