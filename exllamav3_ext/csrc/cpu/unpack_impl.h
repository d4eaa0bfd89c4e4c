// The states of a tile, by plain loops that compilers vectorize well enough: unpacking serves
// tests, inspection and tools, not the product.

#pragma once

#include "cpu/window_plan.h"

namespace exl3 {
namespace {

template <int HalfBits>
EXL3_INLINE void tile_states(const uint32_t* words, uint32_t* states) {
    using Plan = WindowPlan<HalfBits, 16>;
    static constexpr Plan plan;
    constexpr int kHalves = tile_halves(HalfBits);
    uint32_t halves[2 + kHalves];  // in ring order, behind the ring's last word
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
}

template <int HalfBits>
void unpack_tiles(const uint32_t* words, int64_t count, uint16_t* states) {
    uint32_t wide[kTileWeights];
    for (int64_t tile = 0; tile < count; ++tile, words += tile_words(HalfBits)) {
        tile_states<HalfBits>(words, wide);
        for (int t = 0; t < kTileWeights; ++t) *states++ = uint16_t(wide[t]);
    }
}

}  // namespace
}  // namespace exl3
