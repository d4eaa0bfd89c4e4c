// Forward pass of the trellis search: the cheapest way to every node, position by position.
//
//     cost_t[o] = min over c of  cost_{t-1}[(c, oh)] + (value(c, oh, ol) - w_t)^2,   o = (oh, ol)
//
// One block of 512 threads takes two tiles (one at K=1). Every thread keeps its 128 codebook values
// in 64 registers; costs of the two tiles are the halves of one word in shared memory, so one half2
// instruction serves both: subtract, fused multiply-add, minimum for one state of two tiles.
// 65,536 x 3 of them a step are 1,536 issue cycles of an SM; this count limits the kernel. Other
// traffic: 16 loads of in-costs and 2 stores a thread (K=4), and every kHop-th cost vector to global
// memory (4 KB a tile and step at K=4, about 1 TB/s over a whole H200).
//
// The free pass starts with all costs 0 at position 256 - kWarmup and runs on through position 0
// to 255; a forced pass starts at position 0 from one node. Costs are float16; every kRenorm steps
// the cost of node 0 is taken off all of them, which keeps them small and changes no decision.

#pragma once

#include "viterbi_engine.cuh"

namespace exl3::search {

struct ForwardArgs {
    const float* tiles;      // (count, 256)
    __half* history;         // (blocks, Layout::kHistory)
    const int32_t* order;    // forced pass: numbers of the tiles to search
    const int32_t* n_order;  // forced pass: how many they are
    const int32_t* roots;    // forced pass: start node of each tile, by tile number
    int count;               // free pass: tiles
    int codebook;
};

__device__ __forceinline__ void set(__half& to, const float (&from)[2]) {
    to = __float2half_rn(from[0]);
}
__device__ __forceinline__ void set(__half2& to, const float (&from)[2]) {
    to = __floats2half2_rn(from[0], from[1]);
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
    int tile[2];
    for (int i = 0; i < 2; ++i) {  // a missing second tile is the first again
        const int index = min(first + (G::kTiles == 2 ? i : 0), total - 1);
        tile[i] = kForced ? args.order[index] : index;
    }
    if (threadIdx.x < 256)
        weights[threadIdx.x] =
            __halves2half2(target(args.tiles[int64_t(tile[0]) * 256 + threadIdx.x]),
                           target(args.tiles[int64_t(tile[1]) * 256 + threadIdx.x]));
    Cost* history = reinterpret_cast<Cost*>(args.history + blockIdx.x * G::kHistory);
    Cost* in = reinterpret_cast<Cost*>(shared);
    Cost* next = in + G::kPadded;
    for (int node = threadIdx.x; node < G::kNodes; node += kThreads) {
        float start[2] = {0.0f, 0.0f};
        if (kForced)
            for (int i = 0; i < 2; ++i)
                start[i] = node == args.roots[tile[i]] ? 0.0f : kForbidden;
        set(in[G::shared_index(node)], start);
        if (kForced) set(history[G::history_index(node)], start);
    }
    Engine<K> engine(threadIdx.x, args.codebook);
    __syncthreads();

    for (int t = kForced ? 0 : -kWarmup; t < 256; ++t) {
        const bool keep = t >= -1 && (t + 1) % G::kHop == 0;
        Cost* slot = keep ? history + int64_t((t + 1) / G::kHop) * G::kNodes : nullptr;
        engine.step(in, next, slot, weights[t & 255], (t & (kRenorm - 1)) == kRenorm - 1);
        __syncthreads();
        Cost* swap = in;
        in = next;
        next = swap;
    }
}

}  // namespace exl3::search
