// The 128-point orthonormal Hadamard transform in one warp: lane L holds elements 4 L .. 4 L + 3.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "format.h"
#include "linear_params.h"

#include <type_traits>

namespace exl3 {

__device__ __forceinline__ float4 hadamard128(float4 v, float scale = kHadamardScale) {
    v = {v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w};
    v = {v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w};
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float sign = threadIdx.x & step ? -1.f : 1.f;
        v.x = fmaf(v.x, sign, __shfl_xor_sync(~0u, v.x, step));
        v.y = fmaf(v.y, sign, __shfl_xor_sync(~0u, v.y, step));
        v.z = fmaf(v.z, sign, __shfl_xor_sync(~0u, v.z, step));
        v.w = fmaf(v.w, sign, __shfl_xor_sync(~0u, v.w, step));
    }
    return {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
}

__device__ __forceinline__ float2 float2_of(uint32_t u, Float type) {
    if (type == Float::kHalf) return __half22float2(*reinterpret_cast<__half2*>(&u));
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&u));
}

// Elements i .. i + 3 of an array, i a multiple of 4: as stored, and as numbers.
__device__ __forceinline__ uint4 load_raw4(const void* p, int64_t i, Float type) {
    if (type == Float::kFloat) return __ldg(static_cast<const uint4*>(p) + i / 4);
    const uint2 u = __ldg(static_cast<const uint2*>(p) + i / 4);
    return {u.x, u.y, 0, 0};
}
__device__ __forceinline__ float4 float4_of(uint4 u, Float type) {
    if (type == Float::kFloat)
        return {__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z),
                __uint_as_float(u.w)};
    const float2 a = float2_of(u.x, type), b = float2_of(u.y, type);
    return {a.x, a.y, b.x, b.y};
}
__device__ __forceinline__ float4 load4(const void* p, int64_t i, Float type) {
    return float4_of(load_raw4(p, i, type), type);
}

// Calls f with the type as a constant.
template <class F>
__device__ __forceinline__ void with_type(Float type, F&& f) {
    if (type == Float::kHalf)
        f(std::integral_constant<Float, Float::kHalf>{});
    else if (type == Float::kFloat)
        f(std::integral_constant<Float, Float::kFloat>{});
    else
        f(std::integral_constant<Float, Float::kBFloat16>{});
}

// An array of numbers of one type, four by four, from element `first` (a multiple of 4) on.
template <Float Type>
struct Quadruples {
    const uint2* base;
    __device__ __forceinline__ Quadruples(const void* p, int64_t first)
        : base(static_cast<const uint2*>(p) + first / (Type == Float::kFloat ? 2 : 4)) {}

    // Four numbers rounded to float16.
    __device__ __forceinline__ uint2 halves(int i) const {
        if constexpr (Type == Float::kHalf) return __ldg(base + i);
        float4 v;
        if constexpr (Type == Float::kFloat) {
            v = __ldg(reinterpret_cast<const float4*>(base) + i);
        } else {
            const uint2 u = __ldg(base + i);
            v = float4_of({u.x, u.y, 0, 0}, Type);
        }
        const __half2 h[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
        return *reinterpret_cast<const uint2*>(h);
    }
};

__device__ __forceinline__ void store4(void* p, int64_t i, float4 v, Float type) {
    if (type == Float::kFloat) {
        reinterpret_cast<float4*>(p)[i / 4] = v;
    } else if (type == Float::kHalf) {
        const __half2 pair[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
        reinterpret_cast<uint2*>(p)[i / 4] = *reinterpret_cast<const uint2*>(pair);
    } else {
        const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y),
                                        __floats2bfloat162_rn(v.z, v.w)};
        reinterpret_cast<uint2*>(p)[i / 4] = *reinterpret_cast<const uint2*>(pair);
    }
}

__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
    return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

}  // namespace exl3
