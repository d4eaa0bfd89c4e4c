// The 128-point Walsh-Hadamard transform, in place: seven butterfly stages of distance 1 to 64. The
// order of the additions does not depend on the instruction set, so neither do the results.

#pragma once

#include <utility>

#include "format.h"
#include "cpu/simd.h"

namespace exl3 {
namespace {

// y[i] = x[i] + x[i ^ Distance], or x[i ^ Distance] - x[i] where i has that bit.
template <int Distance, int... Lane>
EXL3_INLINE F butterfly_inside(F x, std::integer_sequence<int, Lane...>) {
    const F partner = __builtin_shufflevector(x, x, (Lane ^ Distance)...);
    const F sign = {((Lane & Distance) ? -1.0f : 1.0f)...};
    return partner + sign * x;
}

template <int Distance>
EXL3_INLINE F butterfly_inside(F x) {
    return butterfly_inside<Distance>(x, std::make_integer_sequence<int, kLanes>{});
}

void hadamard_blocks(float* x, int64_t blocks) {
    constexpr int kVectors = kBlock / kLanes;
    for (int64_t block = 0; block < blocks; ++block, x += kBlock) {
        F v[kVectors];
#pragma GCC unroll 32
        for (int i = 0; i < kVectors; ++i) {
            v[i] = load(x + i * kLanes);
            v[i] = butterfly_inside<1>(v[i]);
            v[i] = butterfly_inside<2>(v[i]);
            if constexpr (kLanes > 4) v[i] = butterfly_inside<4>(v[i]);
            if constexpr (kLanes > 8) v[i] = butterfly_inside<8>(v[i]);
        }
#pragma GCC unroll 8
        for (int distance = 1; distance < kVectors; distance *= 2) {
#pragma GCC unroll 32
            for (int i = 0; i < kVectors; ++i) {
                if (i & distance) continue;
                const F a = v[i], b = v[i + distance];
                v[i] = a + b;
                v[i + distance] = a - b;
            }
        }
#pragma GCC unroll 32
        for (int i = 0; i < kVectors; ++i) store(x + i * kLanes, v[i] * kHadamardScale);
    }
}

}  // namespace
}  // namespace exl3
