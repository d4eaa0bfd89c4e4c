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
    // vector before it: H*K bits, so up to 256 paths.
    static constexpr int kHop = K == 1 ? 8 : K == 2 ? 4 : K <= 4 ? 2 : 1;
    static constexpr int kHopBits = kHop * K;
    static constexpr int kLowBits = 16 - K - kHopBits;
    static constexpr int kSlots = 256 / kHop + 1;  // slot 0: the costs before position 0
    // Half-precision costs of one block's history.
    static constexpr int64_t kHistory = int64_t(kSlots) * kNodes * kTiles;
    // History index of a node. Up to 4 bits the in-nodes of a hop lie side by side, one coalesced
    // read; with more, writing whole rows matters more than reading at most 256 words.
    static constexpr bool kSideBySide = K <= 4;
    __device__ static constexpr int history_index(int node) {
        if (!kSideBySide) return node;
        return (node & ((1 << kLowBits) - 1)) << kHopBits | node >> kLowBits;
    }

    // Costs in shared memory, in units of four words: the units of eight neighbours are swapped so
    // that the wide stores of eight threads, 64 (K=2, 3) or 32 (K=4) bytes apart, miss each other's
    // banks. Only bits of oh take part, so branch c of a node is L words further on.
    static constexpr int kSwizzle = K == 2 || K == 3 ? 3 : K == 4 ? 1 : 0;
    static constexpr int kSharedBytes = K == 1 ? 2 * kNodes * 2 : 2 * kNodes * 4;
    __device__ static constexpr int shared_index(int node) {
        return node ^ (node >> 5 & kSwizzle) << 2;
    }

    // From 6 bits on squared errors sink to float16's subnormal range, so everything is scaled up.
    // Targets beyond the clamp are equally far from every codebook value, and must not overflow.
    static constexpr float kScale = K >= 6 ? 8.0f : 1.0f;
    static constexpr float kClamp = K >= 6 ? 5.0f : 16.0f;
    // Costs grow with every step, and float16 must stay small where it matters: near the least
    // cost. Every kRenorm steps something is taken off them. Up to 4 bits the cost of node 0 will
    // do. With more, node 0 may lie hundreds of steps' worth of error above the least (its 2^K ways
    // in all miss a target in the tail), and would leave the good paths far below 0, where the
    // rounding is coarser than a step: there it is the least. A target beyond nearly all codebook
    // values raises all costs at once; then the least is taken off at once.
    static constexpr int kRenorm = 16;
    static constexpr bool kOffLeast = K >= 5;
    static constexpr float kFar = 3.0f;

    // Positions from 0 that a forced pass searches again.
    static constexpr int kForcedSteps = K == 1 ? 256 : K == 2 ? 128 : K == 3 ? 64 : 32;
    // Steps before position 0 whose only product is the first costs.
    static constexpr int kWarmup = K == 1 ? 128 : 96;
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

// Codebook value and target weight as the search of K bits sees them. NaN counts as 0.
template <int K>
__device__ __forceinline__ __half scaled_value(uint32_t state, int codebook) {
    return __hmul(codebook_value(state, codebook), __float2half_rn(Layout<K>::kScale));  // exact
}
template <int K>
__device__ __forceinline__ __half scaled_target(float w) {
    constexpr float kClamp = Layout<K>::kClamp;
    const float clamped = w == w ? fmaxf(fminf(w, kClamp), -kClamp) : 0.0f;
    return __float2half_rn(clamped * Layout<K>::kScale);
}

}  // namespace exl3::search
