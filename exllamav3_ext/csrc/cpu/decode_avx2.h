// Decoding tiles with AVX2: 8 states at a time straight from the packed words. Per group: one
// 16-byte load, broadcast, one byte shuffle, one variable shift, one mask; then the codebook.

#pragma once

#include "cpu/window_plan.h"

namespace exl3 {
namespace {

template <int HalfBits>
struct DecodePlan {
    using Plan = WindowPlan<HalfBits, 8>;
    alignas(32) uint8_t shuffle[Plan::kPhases][32];
    alignas(32) uint32_t shifts[Plan::kPhases][8];

    constexpr DecodePlan() : shuffle{}, shifts{} {
        const Plan plan;
        for (int phase = 0; phase < Plan::kPhases; ++phase)
            for (int i = 0; i < 8; ++i) {
                const int low = plan.halves[phase][i] ^ 1, high = (plan.halves[phase][i] - 1) ^ 1;
                shuffle[phase][4 * i] = uint8_t(2 * low);
                shuffle[phase][4 * i + 1] = uint8_t(2 * low + 1);
                shuffle[phase][4 * i + 2] = uint8_t(2 * high);
                shuffle[phase][4 * i + 3] = uint8_t(2 * high + 1);
                shifts[phase][i] = uint32_t(plan.shifts[phase][i]);
            }
    }
};

template <int CodebookId>
EXL3_INLINE __m256 codebook_values(__m256i state) {
    if constexpr (CodebookId == kMul1) {
        const __m256i hash = _mm256_mullo_epi32(state, _mm256_set1_epi32(int(kMul1Multiplier)));
        const __m256i pairs = _mm256_maddubs_epi16(hash, _mm256_set1_epi8(1));
        const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        return round_to_half(_mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(kMul1Scale),
                                             _mm256_set1_ps(1024 * kMul1Scale + kMul1Offset)));
    } else {
        constexpr uint32_t multiplier = CodebookId == kMcg ? kMcgMultiplier : kInst3Multiplier;
        __m256i hash = _mm256_mullo_epi32(state, _mm256_set1_epi32(int(multiplier)));
        if constexpr (CodebookId == kInst3)
            hash = _mm256_add_epi32(hash, _mm256_set1_epi32(int(kInst3Addend)));
        const __m256i mask = _mm256_set1_epi32(int(kWideHalfMask));
        const __m256i flip = _mm256_set1_epi32(int(kWideHalfFlip));
        const __m256i high = _mm256_srai_epi32(hash, 3);
        const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(hash, 16), 3);
        const __m256i a = _mm256_xor_si256(_mm256_and_si256(high, mask), flip);
        const __m256i b = _mm256_xor_si256(_mm256_and_si256(low, mask), flip);
        return round_to_half(_mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
    }
}

template <int HalfBits, int CodebookId>
void decode_tiles(const uint32_t* words, int64_t stride, int64_t count, float* values) {
    using Plan = WindowPlan<HalfBits, 8>;
    static constexpr DecodePlan<HalfBits> plan;
    for (int64_t tile = 0; tile < count; ++tile, words += stride, values += kTileWeights) {
#pragma GCC unroll 32
        for (int group = 0; group < 32; ++group) {
            constexpr int last = Plan::kWords - 1;
            const int phase = group % Plan::kPhases;
            const int base = Plan::base(group);
            __m128i source;
            if (base < 0) {  // ring bits before the tile's first word are in its last word
                const __m128i up = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words));
                const __m128i before = _mm_cvtsi32_si128(int(words[last]));
                source = _mm_blend_epi16(_mm_slli_si128(up, 4), before, 3);
            } else if (base + 4 > Plan::kWords) {  // do not read past the end of the tile
                const int left = Plan::kWords - base;
                const __m128i inside =
                    _mm_setr_epi32(-(left > 0), -(left > 1), -(left > 2), -(left > 3));
                source = _mm_maskload_epi32(reinterpret_cast<const int*>(words + base), inside);
            } else {
                source = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + base));
            }
            const __m256i pairs = _mm256_shuffle_epi8(
                _mm256_broadcastsi128_si256(source),
                _mm256_load_si256(reinterpret_cast<const __m256i*>(plan.shuffle[phase])));
            const __m256i window = _mm256_srlv_epi32(
                pairs, _mm256_load_si256(reinterpret_cast<const __m256i*>(plan.shifts[phase])));
            const __m256i state = _mm256_and_si256(window, _mm256_set1_epi32(0xffff));
            _mm256_storeu_ps(values + 8 * group, codebook_values<CodebookId>(state));
        }
    }
}

}  // namespace
}  // namespace exl3
