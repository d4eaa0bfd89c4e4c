// From packed bits to codebook values, in registers.
//
// A *chunk* is an eighth of a tile: ring positions 32 r .. 32 r + 31, which are the columns r and
// r + 8 of the tile over all 16 rows, in 32 K contiguous bits. One lane owns one chunk, so a value
// needs no exchange between lanes. Position 8 w + s of the chunk (w = 0..3, s = 0..7) is
//
//     row 2 w + {0, 1, 8, 9, 0, 1, 8, 9}[s],  column r (s < 4) or r + 8 (s >= 4).
//
// Cost per weight on the integer pipes: one byte permutation for a state whose window starts on a
// byte of the stream or of one shifted copy of it, one multiply for the hash. The permutation
// writes the 16-bit state twice, state * 0x10001, because zeroing the upper half would need a third
// source register; the factor is divided out of the multiplier modulo 2^32, where 0x10001 is
// invertible.

#pragma once

#include "format.h"
#include "ptx.cuh"

namespace exl3 {

inline constexpr uint32_t kTwiceInverse = 0xFFFF0001u;  // 0x10001 * this = 1 (mod 2^32)

// Multipliers and addend that hash a state, or a state times 0x10001.
struct Hash {
    uint32_t for_twice, for_state, addend;
    __device__ __forceinline__ uint32_t of_twice(uint32_t twice) const {
        return twice * for_twice + addend;
    }
    __device__ __forceinline__ uint32_t of_state(uint32_t state) const {
        return state * for_state + addend;
    }
};
__host__ __device__ constexpr Hash hash_of(int codebook) {
    const uint32_t multiplier = codebook == kInst3 ? kInst3Multiplier
                                : codebook == kMcg ? kMcgMultiplier
                                                   : kMul1Multiplier;
    return {multiplier * kTwiceInverse, multiplier, codebook == kInst3 ? kInst3Addend : 0};
}

// Layout in shared memory of four tile rows, each of `Tiles` adjacent tiles. The pitch is chosen so
// that the 32 lanes of a warp (chunk r of tile row q, lane = 4 r + q) read without bank conflicts.
template <int HalfBits, int Tiles>
struct Stage {
    static constexpr int kRowBytes = Tiles * 16 * HalfBits;
    static constexpr int kWanted = HalfBits == 16      ? 64
                                   : HalfBits % 4 == 2 ? (16 * HalfBits) % 128
                                                       : 32;  // pitch mod 128
    static constexpr int kPitch = kRowBytes + (kWanted - kRowBytes % 128 + 128) % 128;
    static constexpr int kBytes = 4 * kPitch;
    static constexpr int kPieces = kRowBytes / 16;  // copies of 16 bytes in a row

    // At K = 8 no pitch avoids conflicts of 16-byte reads at a stride of 32: swap neighbours too.
    static __device__ __forceinline__ int flip(int row) {
        return HalfBits == 16 ? (row >> 1) & 1 : 0;
    }
};

template <int HalfBits>
struct Chunk {
    static constexpr int kWords = (HalfBits + 1) / 2;
    uint32_t word[kWords];  // bits of the chunk, first bit = bit 31 of word[0]
    uint32_t before;        // the 32 ring bits before it

    // Reads chunk r of the tile that starts at `tile`, a shared-memory address in row q of a stage.
    __device__ __forceinline__ void load(const char* tile, int r, int q) {
        if constexpr (HalfBits % 2 == 1) {  // chunks of odd r start in the middle of a word
            const auto* words = reinterpret_cast<const uint32_t*>(tile);
            const int first = (HalfBits * r) >> 1, shift = 16 * (r & 1);
            uint32_t raw[kWords + 1];
#pragma unroll
            for (int i = 0; i < kWords; ++i) raw[i] = words[first + i];
            raw[kWords] = 0;
            const uint32_t previous = words[r == 0 ? tile_words(HalfBits) - 1 : first - 1];
            before = __funnelshift_l(raw[0], previous, shift);
#pragma unroll
            for (int i = 0; i < kWords; ++i) word[i] = __funnelshift_l(raw[i + 1], raw[i], shift);
        } else if constexpr (HalfBits == 16) {
            const auto* pieces = reinterpret_cast<const uint4*>(tile);
            const int flip = Stage<16, 1>::flip(q);
            const uint4 a = pieces[(2 * r) ^ flip], b = pieces[(2 * r + 1) ^ flip];
            word[0] = a.x, word[1] = a.y, word[2] = a.z, word[3] = a.w;
            word[4] = b.x, word[5] = b.y, word[6] = b.z, word[7] = b.w;
            before = reinterpret_cast<const uint32_t*>(&pieces[((2 * r + 15) & 15) ^ flip])[3];
        } else {
            const char* p = tile + r * (2 * HalfBits);
            if constexpr (HalfBits == 8) {
                const uint4 a = *reinterpret_cast<const uint4*>(p);
                word[0] = a.x, word[1] = a.y, word[2] = a.z, word[3] = a.w;
            } else if constexpr (HalfBits % 4 == 0) {
#pragma unroll
                for (int i = 0; i < kWords / 2; ++i) {
                    const uint2 a = reinterpret_cast<const uint2*>(p)[i];
                    word[2 * i] = a.x, word[2 * i + 1] = a.y;
                }
            } else {
#pragma unroll
                for (int i = 0; i < kWords; ++i) word[i] = reinterpret_cast<const uint32_t*>(p)[i];
            }
            const int last = r == 0 ? tile_words(HalfBits) - 1 : r * kWords - 1;
            before = reinterpret_cast<const uint32_t*>(tile)[last];
        }
    }

    // Hash of the state at position P. `Balance` moves a quarter of the integer work or more from
    // the shift and logic pipe to the multiplier's: a state in one half of a register is cut out by
    // a dot product with (1, 0) or (0, 1).
    template <int P, bool Balance>
    __device__ __forceinline__ uint32_t hashed(const Hash& hash) const {
        constexpr int end = window_end(HalfBits, P), index = (end - 1) / 32;
        constexpr int shift = 32 * (index + 1) - end, byte = shift / 8, odd_bits = shift % 8;
        constexpr uint32_t pick = byte | (byte + 1) << 4 | byte << 8 | (byte + 1) << 12;
        const uint32_t low = word[index], high = at(index - 1);
        uint32_t shifted = low;
        if constexpr (odd_bits != 0) shifted = __funnelshift_r(low, high, odd_bits);
        if constexpr (Balance && byte % 2 == 0)
            return hash.of_state(__dp2a_lo(shifted, byte == 0 ? 0x0001u : 0x0100u, 0u));
        if constexpr (byte < 3) return hash.of_twice(__byte_perm(shifted, 0, pick));
        // The window reaches into the previous word. Where that word's shifted copy is needed
        // anyway (the shifts of neighbours coincide every 24 bits or less), take the byte from
        // there.
        if constexpr (odd_bits == 0) return hash.of_twice(__byte_perm(low, high, pick));
        if constexpr (HalfBits <= 8 || HalfBits == 12) {
            const uint32_t further = index > 0
                                         ? __funnelshift_r(at(index - 1), at(index - 2), odd_bits)
                                         : high >> odd_bits;
            return hash.of_twice(__byte_perm(shifted, further, pick));
        }
        return hash.of_twice(__byte_perm(__funnelshift_r(low, high, shift), 0, 0x1010));
    }

  private:
    __device__ __forceinline__ uint32_t at(int index) const {
        return index < 0 ? before : word[index];
    }
};

// Two halves in one register whose exact sum, rounded once, is the 3inst or mcg value.
__device__ __forceinline__ uint32_t two_halves(uint32_t hash) {
    uint32_t z;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(z) : "r"(hash), "n"(kHalvesMask), "n"(kHalvesFlip));
    return z;
}
// mul1: 1024 + B, B the sum of the bytes of the hash, and -1534, as float16: together B - 510.
// The dot product shares a pipe with the multiplication that made the hash; `OtherPipe` takes the
// sum of absolute differences, an instruction of the logic pipe.
template <bool OtherPipe>
__device__ __forceinline__ uint32_t centred_mul1(uint32_t hash) {
    if constexpr (!OtherPipe) return __dp4a(hash, 0x01010101u, 0xE5FE6400u);
    uint32_t z;
    asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;"
        : "=r"(z)
        : "r"(hash), "r"(0), "r"(0xE5FE6400u));
    return z;
}
// Two finished float16 values in one register.
__device__ __forceinline__ uint32_t pair_of_sums(uint32_t z0, uint32_t z1) {
    return bits_of(
        __hadd2(half2_of(__byte_perm(z0, z1, 0x5410)), half2_of(__byte_perm(z0, z1, 0x7632))));
}
__device__ __forceinline__ uint32_t pair_of_mul1(uint32_t x0, uint32_t x1) {
    const uint32_t b0 = __dp4a(x0, 0x01010101u, 0x6400u), b1 = __dp4a(x1, 0x01010101u, 0x6400u);
    const __half2 sums = half2_of(__byte_perm(b0, b1, 0x5410));  // 1024 + byte sum, exact
    return bits_of(__hfma2(sums, half2_of(0x1EEE1EEEu), half2_of(0xC931C931u)));
}

}  // namespace exl3
