// Loads and stores of elements whose type is known at run time, and sums over threads.

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

// Four at once, from an element whose place is a multiple of four; see `takes_fours`.
__device__ __forceinline__ float4 load4(const Array& a, int64_t i) {
    if (a.type == Type::kFloat) return static_cast<const float4*>(a.data)[i / 4];
    const uint2 u = static_cast<const uint2*>(a.data)[i / 4];
    float2 low, high;
    if (a.type == Type::kHalf) {
        low = __half22float2(reinterpret_cast<const __half2&>(u.x));
        high = __half22float2(reinterpret_cast<const __half2&>(u.y));
    } else {
        low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(u.x));
        high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(u.y));
    }
    return {low.x, low.y, high.x, high.y};
}

__device__ __forceinline__ void store4(const MutableArray& a, int64_t i, float4 v) {
    if (a.type == Type::kFloat) {
        static_cast<float4*>(a.data)[i / 4] = v;
    } else if (a.type == Type::kHalf) {
        const __half2 pair[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
        static_cast<uint2*>(a.data)[i / 4] = reinterpret_cast<const uint2&>(pair);
    } else {
        const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y),
                                        __floats2bfloat162_rn(v.z, v.w)};
        static_cast<uint2*>(a.data)[i / 4] = reinterpret_cast<const uint2&>(pair);
    }
}

// Whether runs of `length` elements can be loaded and stored four at once. No array counts as one
// that can.
inline bool takes_fours(const void* data, int64_t length) {
    return length % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

__device__ __forceinline__ float warp_sum(float value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// The sum over all threads of the block, in a fixed order, known to every thread. The block is one
// dimension of whole warps; may be called again, since it begins with a barrier.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float warp_sums[32];
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.f;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += warp_sums[warp];
    return total;
}

}  // namespace exl3::run
