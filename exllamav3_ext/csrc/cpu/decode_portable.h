// Decoding tiles without vector instructions of a particular machine: plain loops over a tile, which
// compilers vectorize for whatever they target.

#pragma once

#include <bit>

#include "cpu/window_plan.h"

namespace exl3 {
namespace {

template <int HalfBits, int CodebookId>
void decode_tiles(const uint32_t* words, int64_t stride, int64_t count, float* values) {
    using Plan = WindowPlan<HalfBits, 16>;
    static constexpr Plan plan;
    constexpr int kHalves = tile_halves(HalfBits);
    // Ring order, with the ring's last two halves in front and its first ones behind.
    uint32_t halves[2 + kHalves];
    uint32_t states[kTileWeights];
    for (int64_t tile = 0; tile < count; ++tile, words += stride, values += kTileWeights) {
        for (int i = 0; i < Plan::kWords; ++i) {
            halves[2 + 2 * i] = words[i] >> 16;
            halves[3 + 2 * i] = words[i] & 0xffff;
        }
        halves[0] = halves[kHalves];
        halves[1] = halves[kHalves + 1];
        for (int group = 0; group < Plan::kGroups; ++group) {
            const uint32_t* source = halves + 2 * (Plan::base(group) + 1);
            const int phase = group % Plan::kPhases;
            for (int i = 0; i < 16; ++i) {
                const int half = plan.halves[phase][i];
                const uint32_t pair = source[half - 1] << 16 | source[half];
                states[16 * group + i] = (pair >> plan.shifts[phase][i]) & 0xffff;
            }
        }
        for (int t = 0; t < kTileWeights; ++t) {
            const uint32_t hash = hash_state(states[t], CodebookId);
            float sum;
            if constexpr (CodebookId == kMul1) {
                sum = float(byte_sum(hash)) * kMul1Scale + (1024 * kMul1Scale + kMul1Offset);
            } else {
                const uint32_t high = (uint32_t(int32_t(hash) >> 3) & kWideHalfMask) ^ kWideHalfFlip;
                const uint32_t low =
                    (uint32_t(int32_t(hash << 16) >> 3) & kWideHalfMask) ^ kWideHalfFlip;
                sum = std::bit_cast<float>(high) + std::bit_cast<float>(low);
            }
            const float big = sum * 8193.0f;  // round_to_half of simd.h, one lane
            values[t] = big + (sum - big);
        }
    }
}

}  // namespace
}  // namespace exl3
