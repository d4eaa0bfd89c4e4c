// Decoding tiles with AVX-512 (F, BW, VL): 16 states at a time straight from the packed words.
// Per group: one 32-byte load, one 16-bit permutation, one variable shift, one mask; then the
// codebook. About 14 vector operations for 16 weights.

#pragma once

#include "cpu/window_plan.h"

namespace exl3 {
namespace {

template <int HalfBits>
struct DecodePlan {
    using Plan = WindowPlan<HalfBits, 16>;
    alignas(64) uint16_t permutation[Plan::kPhases][32];
    alignas(64) uint32_t shifts[Plan::kPhases][16];

    constexpr DecodePlan() : permutation{}, shifts{} {
        const Plan plan;
        for (int phase = 0; phase < Plan::kPhases; ++phase)
            for (int i = 0; i < 16; ++i) {
                const int half = plan.halves[phase][i];
                permutation[phase][2 * i] = uint16_t(half ^ 1);
                permutation[phase][2 * i + 1] = uint16_t((half - 1) ^ 1);
                shifts[phase][i] = uint32_t(plan.shifts[phase][i]);
            }
    }
};

template <int CodebookId>
EXL3_INLINE __m512 codebook_values(__m512i state) {
    if constexpr (CodebookId == kMul1) {
        const __m512i hash = _mm512_mullo_epi32(state, _mm512_set1_epi32(int(kMul1Multiplier)));
        const __m512i pairs = _mm512_maddubs_epi16(hash, _mm512_set1_epi8(1));
        const __m512i sum = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
        // (1024 + sum) * scale + offset, with the constant part folded: exact in float32.
        return round_to_half(_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(kMul1Scale),
                                             _mm512_set1_ps(1024 * kMul1Scale + kMul1Offset)));
    } else {
        constexpr uint32_t multiplier = CodebookId == kMcg ? kMcgMultiplier : kInst3Multiplier;
        __m512i hash = _mm512_mullo_epi32(state, _mm512_set1_epi32(int(multiplier)));
        if constexpr (CodebookId == kInst3)
            hash = _mm512_add_epi32(hash, _mm512_set1_epi32(int(kInst3Addend)));
        // A float16 in the upper 16 bits becomes a float32 by an arithmetic shift: copies of the
        // sign, of which the mask keeps the first, and the exponent bias is in the flip.
        const __m512i mask = _mm512_set1_epi32(int(kWideHalfMask));
        const __m512i flip = _mm512_set1_epi32(int(kWideHalfFlip));
        const __m512i high = _mm512_srai_epi32(hash, 3);
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(hash, 16), 3);
        constexpr int xor_and = 0x78;  // a ^ (b & c)
        const __m512 a = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(flip, high, mask, xor_and));
        const __m512 b = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(flip, low, mask, xor_and));
        return round_to_half(_mm512_add_ps(a, b));
    }
}

template <int HalfBits, int CodebookId>
void decode_tiles(const uint32_t* words, int64_t stride, int64_t count, float* values) {
    using Plan = WindowPlan<HalfBits, 16>;
    static constexpr DecodePlan<HalfBits> plan;
    for (int64_t tile = 0; tile < count; ++tile, words += stride, values += kTileWeights) {
#pragma GCC unroll 16
        for (int group = 0; group < 16; ++group) {
            constexpr int last = Plan::kWords - 1;
            const int phase = group % Plan::kPhases;
            const int base = Plan::base(group);
            __m256i source;
            if (group == 0) {  // ring bits before the tile's first word are in its last word
                const __m256i down = _mm256_permutevar8x32_epi32(
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)),
                    _mm256_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6));
                source = _mm256_blend_epi32(down, _mm256_set1_epi32(int(words[last])), 1);
            } else if (base + 8 > Plan::kWords) {  // do not read past the end of the tile
                const __mmask8 inside = __mmask8((1 << (Plan::kWords - base)) - 1);
                source = _mm256_maskz_loadu_epi32(inside, words + base);
            } else {
                source = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + base));
            }
            const __m512i pairs = _mm512_permutexvar_epi16(
                _mm512_load_si512(plan.permutation[phase]), _mm512_castsi256_si512(source));
            const __m512i window = _mm512_srlv_epi32(pairs, _mm512_load_si512(plan.shifts[phase]));
            const __m512i state = _mm512_and_si512(window, _mm512_set1_epi32(0xffff));
            _mm512_storeu_ps(values + 16 * group, codebook_values<CodebookId>(state));
        }
    }
}

}  // namespace
}  // namespace exl3
