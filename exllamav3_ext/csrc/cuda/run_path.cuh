// Loads and stores of elements whose type is known at run time, and a sum over a thread block.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "run_path.h"

namespace exl3::run {

// The type is the same for the whole grid, so the branch costs next to nothing beside the load.
__device__ __forceinline__ float load(const Array& a, int64_t i) {
    if (a.type == Type::kHalf) return __half2float(static_cast<const __half*>(a.data)[i]);
    if (a.type == Type::kFloat) return static_cast<const float*>(a.data)[i];
    return __bfloat162float(static_cast<const __nv_bfloat16*>(a.data)[i]);
}

__device__ __forceinline__ void store(const MutableArray& a, int64_t i, float value) {
    if (a.type == Type::kHalf) {
        static_cast<__half*>(a.data)[i] = __float2half_rn(value);
    } else if (a.type == Type::kFloat) {
        static_cast<float*>(a.data)[i] = value;
    } else {
        static_cast<__nv_bfloat16*>(a.data)[i] = __float2bfloat16_rn(value);
    }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// The sum over all threads of the block, in a fixed order, known to every thread. The block is one
// dimension of whole warps; may be called again, since it begins with a barrier.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float warp_sums[32];
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.f;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += warp_sums[warp];
    return total;
}

}  // namespace exl3::run
