// The EXL3 bytes: rates, bit layout of a tile, tile permutation, codebooks. docs/format.md is the
// authority. Plain constexpr functions without torch, shared by g++ and nvcc.

#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EXL3_FN __host__ __device__ __forceinline__ constexpr
#else
// Always inlined: an out-of-line copy compiled for AVX-512 must never be what the linker keeps.
#define EXL3_FN [[gnu::always_inline]] inline constexpr
#endif

namespace exl3 {

inline constexpr int kTile = 16;           // edge of a tile
inline constexpr int kTileWeights = 256;   // weights of a tile = length of its ring
inline constexpr int kBlock = 128;         // channels rotated together
inline constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128)

enum Codebook : int { kInst3 = 0, kMcg = 1, kMul1 = 2 };

// Rates are counted in half bits, so that 1.5, 2.5 and 3.5 are integers: K = half_bits / 2.
// A tile takes 8 * half_bits uint16, that is 4 * half_bits uint32.
EXL3_FN bool is_rate(int half_bits) {
    return half_bits >= 2 && half_bits <= 16 &&
           (half_bits % 2 == 0 || half_bits == 3 || half_bits == 5 || half_bits == 7);
}
EXL3_FN int tile_words(int half_bits) { return 4 * half_bits; }
EXL3_FN int tile_halves(int half_bits) { return 8 * half_bits; }

// New bits at ring position t, and the ring bit at which the window of position t ends (exclusive).
// Half rates give odd positions one bit more.
EXL3_FN int symbol_bits(int half_bits, int t) { return (half_bits + (t & 1)) / 2; }
EXL3_FN int window_end(int half_bits, int t) {
    return (t + 1) * (half_bits / 2) + (half_bits % 2 ? (t + 1) / 2 : 0);
}

// The 16 ring bits that end at window_end(t), from the tile's words. Ring bit 32 w is bit 31 of
// word w; the ring is closed, so a window may begin at the end of the tile.
EXL3_FN uint32_t state_at(const uint32_t* words, int half_bits, int t) {
    const int count = tile_words(half_bits);
    const int end = window_end(half_bits, t) + 32 * count;
    const int first = (end - 16) / 32, last = (end - 1) / 32;
    const uint64_t pair = (uint64_t(words[first % count]) << 32) | words[last % count];
    return uint32_t(pair >> (32 * (last + 1) - end)) & 0xffffu;
}

// Ring position <-> element of the 16x16 tile (row = input channel, column = output channel): the
// B fragment order of mma.m16n8k16, lane = t >> 3.
EXL3_FN int tile_row(int t) { return 8 * ((t >> 1) & 1) + 2 * ((t >> 3) & 3) + (t & 1); }
EXL3_FN int tile_col(int t) { return 8 * ((t >> 2) & 1) + (t >> 5); }
EXL3_FN int ring_position(int row, int col) {
    return (col & 7) << 5 | ((row >> 1) & 3) << 3 | (col >> 3) << 2 | (row >> 3) << 1 | (row & 1);
}

// Codebooks. A state becomes a 32-bit integer; then either the sum of two float16 halves
// (3inst, mcg) or an affine map of the sum of its four bytes (mul1), rounded to float16 once.
inline constexpr uint32_t kInst3Multiplier = 89226354u;
inline constexpr uint32_t kInst3Addend = 64248484u;
inline constexpr uint32_t kMcgMultiplier = 0xCBAC1FEDu;
inline constexpr uint32_t kMul1Multiplier = 0x83DCD12Du;
inline constexpr uint32_t kHalvesMask = 0x8FFF8FFFu;  // keeps sign and low 12 bits of each half
inline constexpr uint32_t kHalvesFlip = 0x3B603B60u;  // puts both in [2^-3, 2) by magnitude
// The same for a half in the upper 16 bits, shifted right arithmetically by 3: that is a float32
// with the mantissa in place and too small an exponent, which the flip corrects.
inline constexpr uint32_t kWideHalfMask = 0x81FFE000u;
inline constexpr uint32_t kWideHalfFlip = 0x38000000u ^ (0x3B600000u >> 3);
inline constexpr float kMul1Scale = 0.00676727294921875f;  // float16 bits 0x1EEE
inline constexpr float kMul1Offset = -10.3828125f;         // float16 bits 0xC931

EXL3_FN uint32_t hash_state(uint32_t state, int codebook) {
    return codebook == kInst3 ? state * kInst3Multiplier + kInst3Addend
           : codebook == kMcg ? state * kMcgMultiplier
                              : state * kMul1Multiplier;
}
EXL3_FN uint32_t halves_of(uint32_t hash) { return (hash & kHalvesMask) ^ kHalvesFlip; }
EXL3_FN uint32_t byte_sum(uint32_t hash) {
    return (hash & 0xff) + ((hash >> 8) & 0xff) + ((hash >> 16) & 0xff) + (hash >> 24);
}

}  // namespace exl3
