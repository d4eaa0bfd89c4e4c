#include "cuda/linear_launch.cuh"

namespace exl3 {
EXL3_INSTANTIATE(32, 0, false)
}  // namespace exl3
