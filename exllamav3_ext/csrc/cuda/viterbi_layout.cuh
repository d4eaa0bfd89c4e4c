// Shapes shared by the kernels of the tile quantizer: how a tile's trellis is spread over a thread
// block, and how cost vectors lie in shared memory and in the history.
//
// With K bits a weight there are N = 2^(16-K) nodes and C = 2^K branches into each. At every ring
// position the state s = (c, oh, ol), c and ol of K bits, goes from node (c, oh) to node (oh, ol):
//
//     s = | c | oh | ol |      in-node = s >> K       out-node = s & (N - 1)
//
// All states together are 65,536 codebook values. A block of 512 threads keeps 128 of them in each
// thread's registers for its whole life: OB values of ol, HB of oh, CB of c.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../format.h"

namespace exl3::search {

inline constexpr int kThreads = 512;
inline constexpr int kWarmup = 96;  // steps before position 0 whose only product is the first costs
inline constexpr int kRenorm = 16;  // steps between subtractions of a common cost
inline constexpr float kClamp = 16.0f;      // beyond it every codebook value is equally wrong
inline constexpr float kForbidden = 30000;  // cost of a start node that a forced pass excludes

template <int K>
struct Layout {
    static constexpr int kNodes = 1 << (16 - K);
    static constexpr int C = 1 << K;          // branches into a node, and out of it
    static constexpr int L = 1 << (16 - 2 * K);  // values of oh
    static constexpr int CB = C < 64 ? C : 64;
    static constexpr int OB = K == 1 ? 2 : K == 2 ? 4 : K <= 4 ? 8 : K == 5 ? 4 : 2;
    static constexpr int HB = 128 / (CB * OB);
    static constexpr int kSplit = C / CB;  // threads that share the branches of one node
    static_assert(OB * HB * CB == 128 && (C / OB) * (L / HB) * kSplit == kThreads);

    // Tiles searched together by one block: their costs are the two halves of a word. K=1 has too
    // many nodes for that; there the halves are two neighbouring nodes of one tile.
    static constexpr int kTiles = K == 1 ? 1 : 2;

    // Cost vectors are kept every kHop steps, and the branches of a hop are found again from the
    // vector before it: H*K bits, so up to 256 paths, one coalesced read.
    static constexpr int kHop = K == 1 ? 8 : K == 2 ? 4 : K <= 4 ? 2 : 1;
    static constexpr int kHopBits = kHop * K;
    static constexpr int kLowBits = 16 - K - kHopBits;
    static constexpr int kSlots = 256 / kHop + 1;  // slot 0: the costs before position 0

    // 16 bytes of padding keep the 16-byte stores of neighbouring threads off each other's banks.
    static constexpr int kPadEvery = K == 2 || K == 3 ? 16 : K == 4 ? 32 : 0;
    static constexpr int kPadded = kNodes + (kPadEvery ? kNodes / kPadEvery * 4 : 0);
    static constexpr int kSharedBytes = K == 1 ? 2 * kNodes * 2 : 2 * kPadded * 4;

    // History index of a node: the paths into one node of the next kept vector lie side by side.
    __device__ static constexpr int history_index(int node) {
        return (node & ((1 << kLowBits) - 1)) << kHopBits | node >> kLowBits;
    }
    __device__ static constexpr int shared_index(int node) {
        return kPadEvery ? node + node / (kPadEvery ? kPadEvery : 1) * 4 : node;
    }
    // Half-precision costs of one block's history.
    static constexpr int64_t kHistory = int64_t(kSlots) * kNodes * kTiles;
};

__device__ __forceinline__ __half codebook_value(uint32_t state, int codebook) {
    const uint32_t x = hash_state(state, codebook);
    if (codebook == kMul1) {
        const uint32_t sum = __dp4a(x, 0x01010101u, 0x6400u);  // bits of exactly 1024 + B
        return __hfma(__ushort_as_half(uint16_t(sum)), __ushort_as_half(0x1EEE),
                      __ushort_as_half(0xC931));
    }
    const uint32_t z = halves_of(x);
    return __hadd(__ushort_as_half(uint16_t(z)), __ushort_as_half(uint16_t(z >> 16)));
}

// Calls `f` with the codebook as a compile-time constant, once for a whole thread's work: a branch
// for each of 128 values costs registers.
template <int kValue>
struct Constant {
    static constexpr int value = kValue;
};
template <class F>
__device__ __forceinline__ void with_codebook(int codebook, F&& f) {
    if (codebook == kMul1)
        f(Constant<kMul1>{});
    else if (codebook == kMcg)
        f(Constant<kMcg>{});
    else
        f(Constant<kInst3>{});
}

// NaN becomes a finite number too: fmin and fmax return their other argument.
__device__ __forceinline__ __half target(float w) {
    return __float2half_rn(fmaxf(fminf(w, kClamp), -kClamp));
}

}  // namespace exl3::search
