// Decoding tiles without vector instructions of a particular machine: plain loops over a tile,
// which compilers vectorize for whatever they target.

#pragma once

#include <bit>

#include "cpu/unpack_impl.h"

namespace exl3 {
namespace {

template <int HalfBits, int CodebookId>
void decode_tiles(const uint32_t* words, int64_t stride, int64_t count, float* values) {
    uint32_t states[kTileWeights];
    for (int64_t tile = 0; tile < count; ++tile, words += stride, values += kTileWeights) {
        tile_states<HalfBits>(words, states);
        for (int t = 0; t < kTileWeights; ++t) {
            const uint32_t hash = hash_state(states[t], CodebookId);
            float sum;
            if constexpr (CodebookId == kMul1) {
                sum = float(byte_sum(hash)) * kMul1Scale + (1024 * kMul1Scale + kMul1Offset);
            } else {
                const auto widen = [](uint32_t half_on_top) {
                    return (uint32_t(int32_t(half_on_top) >> 3) & kWideHalfMask) ^ kWideHalfFlip;
                };
                const uint32_t high = widen(hash), low = widen(hash << 16);
                sum = std::bit_cast<float>(high) + std::bit_cast<float>(low);
            }
            const float big = sum * 8193.0f;  // round_to_half of simd.h, one lane
            values[t] = big + (sum - big);
        }
    }
}

}  // namespace
}  // namespace exl3
