// Forward pass of the trellis search: the cheapest way to every node, position by position.
//
//     cost_t[o] = min over c of  cost_{t-1}[(c, oh)] + (value(c, oh, ol) - w_t)^2,   o = (oh, ol)
//
// One block of 512 threads takes two tiles (one at K=1). Every thread keeps its 128 codebook values
// in 64 registers; costs of the two tiles are the halves of one word in shared memory, so one half2
// instruction serves both: subtract, fused multiply-add, minimum for one state of two tiles.
// 65,536 x 3 of them a step are 1,536 issue cycles of an SM; this count limits the kernel. Other
// traffic: 16 loads of in-costs and 2 stores a thread (K=4), and every kHop-th cost vector to
// global memory (4 KB a tile and step at K=4, about 1 TB/s over a whole H200).
//
// The free pass starts with all costs 0 at position 256 - kWarmup and runs on through position 0
// to 255. A forced pass starts at position 0 from one node and replaces the first kForcedSteps
// positions of the history: further on its costs differ from the free ones by little more than a
// constant.

#pragma once

#include "viterbi_engine.cuh"

namespace exl3::search {

struct ForwardArgs {
    const float* tiles;      // (count, 256)
    __half* history;         // (count / kTiles, Layout::kHistory)
    const int32_t* order;    // forced pass: numbers of the tiles to search
    const int32_t* n_order;  // forced pass: how many they are
    const int32_t* roots;    // forced pass: start node of each tile, by tile number
    int count;               // free pass: tiles
    int codebook;
};

__device__ __forceinline__ void set(__half& to, float first, float) {
    to = __float2half_rn(first);
}
__device__ __forceinline__ void set(__half2& to, float first, float second) {
    to = __floats2half2_rn(first, second);
}
__device__ __forceinline__ __half first_of(__half cost) { return cost; }
__device__ __forceinline__ __half first_of(__half2 cost) { return __low2half(cost); }

// Where a tile's costs are kept: cost of history index i at [i * kTiles].
template <int K>
__device__ __forceinline__ __half* history_of(__half* history, int tile) {
    using G = Layout<K>;
    return history + tile / G::kTiles * G::kHistory + tile % G::kTiles;
}

template <int K, bool kForced>
__global__ void __launch_bounds__(kThreads, 1) forward(ForwardArgs args) {
    using G = Layout<K>;
    using Cost = typename Engine<K>::Cost;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ __half2 weights[256];

    const int total = kForced ? *args.n_order : args.count;
    const int first = blockIdx.x * G::kTiles;
    if (first >= total) return;
    const int second = min(first + G::kTiles - 1, total - 1);  // a missing one is the first again
    const int tile_a = kForced ? args.order[first] : first;
    const int tile_b = kForced ? args.order[second] : second;
    if (threadIdx.x < 256)
        weights[threadIdx.x] = __halves2half2(
            scaled_target<K>(args.tiles[int64_t(tile_a) * 256 + threadIdx.x]),
            scaled_target<K>(args.tiles[int64_t(tile_b) * 256 + threadIdx.x]));
    Engine<K> engine(threadIdx.x, args.codebook);

    // In the free pass the block's tiles are neighbours and their costs go out as one word.
    __half* const history_a = history_of<K>(args.history, tile_a);
    __half* const history_b = history_of<K>(args.history, tile_b);
    const auto keep = [&](int slot, int node, Cost cost) {
        const int64_t at = int64_t(slot) * G::kNodes + G::history_index(node);
        if constexpr (!kForced) {
            reinterpret_cast<Cost*>(history_a)[at] = cost;
        } else {
            history_a[at * G::kTiles] = first_of(cost);
            if constexpr (G::kTiles == 2) history_b[at * 2] = __high2half(cost);
        }
    };
    Cost* in = reinterpret_cast<Cost*>(shared);
    Cost* next = in + G::kNodes;
    for (int node = threadIdx.x; node < G::kNodes; node += kThreads) {
        Cost start;
        set(start, kForced && node != args.roots[tile_a] ? kForbidden : 0.0f,
            kForced && node != args.roots[tile_b] ? kForbidden : 0.0f);
        in[G::shared_index(node)] = start;
        if constexpr (kForced) keep(0, node, start);
    }
    __syncthreads();

    for (int t = kForced ? 0 : -G::kWarmup; t < (kForced ? G::kForcedSteps : 256); ++t) {
        const int slot = t >= -1 && (t + 1) % G::kHop == 0 ? (t + 1) / G::kHop : -1;
        // In a forced pass not before every node has been reached: node 0 may be forbidden.
        Renorm renorm{};
        if (!kForced || t >= 16) {
            const bool due = (t & (G::kRenorm - 1)) == G::kRenorm - 1;
            if constexpr (G::kOffLeast) {
                const float2 w = __half22float2(weights[t & 255]);
                renorm.least_a = due || fabsf(w.x) > G::kFar * G::kScale;
                renorm.least_b = due || fabsf(w.y) > G::kFar * G::kScale;
            } else {
                renorm.first = due;
            }
        }
        engine.step(in, next, weights[t & 255], renorm,
                    [&](int node, Cost cost) {
                        if (slot >= 0) keep(slot, node, cost);
                    });
        __syncthreads();
        Cost* swap = in;
        in = next;
        next = swap;
    }
}

}  // namespace exl3::search
