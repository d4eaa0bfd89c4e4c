// Traceback of the trellis search: one warp follows one tile from position 255 back to 0.
//
// Only every kHop-th cost vector is kept. A hop goes from node o after it to the vector before it:
// the 16 - K + kHopBits bits (x, o) spell every state between, so 2^kHopBits paths x are evaluated,
// eight a lane at most, and the cheapest is taken. Their in-nodes lie side by side in the history.
// What limits it is the latency of that read, 256 / kHop times in a row; many tiles hide it.
//
// Closing the ring: the best end node's path begins in some node z, its root. The path that *ends*
// in z is the candidate; if it also begins in z, the ring is closed. If not, its root is tried next,
// a few times. What is still open then gets a forced pass from z, where every path begins in z.

#pragma once

#include "viterbi_layout.cuh"

namespace exl3::search {

inline constexpr int kTraceWarps = 4;
inline constexpr int kTrials = 5;

struct TraceArgs {
    const float* tiles;
    const __half* history;
    const int32_t* order;    // forced pass
    const int32_t* n_order;  // forced pass
    int32_t* roots;          // by tile: -1 when closed, else the node to force
    float* values;
    int16_t* states;
    int count;
    int codebook;
};

// Order-preserving key of a cost, with NaN last, above a 16-bit choice.
__device__ __forceinline__ uint32_t key_of(__half cost, uint32_t choice) {
    const uint32_t bits = __half_as_ushort(cost);
    const uint32_t ordered = bits & 0x8000 ? ~bits & 0xffff : bits | 0x8000;
    return (__hisnan(cost) ? 0xffffu : ordered) << 16 | choice;
}

template <int K>
class Tracer {
    using G = Layout<K>;
    const __half* history_;  // of this tile: index * kTiles
    const float* tile_;
    int codebook_, lane_;

  public:
    __device__ Tracer(const __half* history, const float* tile, int codebook, int lane)
        : history_(history), tile_(tile), codebook_(codebook), lane_(lane) {}

    __device__ int cheapest_end() const {
        const __half* last = history_ + int64_t(G::kSlots - 1) * G::kNodes * G::kTiles;
        uint32_t best = 0xffffffffu;
        for (int node = lane_; node < G::kNodes; node += 32)
            best = min(best, key_of(last[G::history_index(node) * G::kTiles], node));
        return int(__reduce_min_sync(0xffffffffu, best) & (G::kNodes - 1));
    }

    // Follows the path that ends in `node`; returns its root. Writes the states unless null.
    __device__ int follow(int node, uint16_t* states) const {
        constexpr int kPaths = 1 << G::kHopBits;
        constexpr int kEach = (kPaths + 31) / 32;
        for (int slot = G::kSlots - 2; slot >= 0; --slot) {
            const __half* from =
                history_ + (int64_t(slot) * G::kNodes + ((node >> G::kHopBits) << G::kHopBits)) *
                               G::kTiles;
            __half w[G::kHop];
#pragma unroll
            for (int j = 0; j < G::kHop; ++j) w[j] = target(tile_[slot * G::kHop + j]);
            uint32_t best = 0xffffffffu;
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const uint32_t x = i * 32 + lane_;
                const uint32_t path = x << (16 - K) | node;
                __half cost = from[x * G::kTiles];
#pragma unroll
                for (int j = 0; j < G::kHop; ++j) {
                    const uint32_t state = path >> ((G::kHop - 1 - j) * K) & 0xffff;
                    const __half d = __hsub(codebook_value(state, codebook_), w[j]);
                    cost = __hfma(d, d, cost);
                }
                best = min(best, key_of(cost, x));
            }
            const uint32_t x = __reduce_min_sync(0xffffffffu, best) & (kPaths - 1);
            const uint32_t path = x << (16 - K) | node;
            if (states && lane_ < G::kHop)
                states[slot * G::kHop + lane_] =
                    uint16_t(path >> ((G::kHop - 1 - lane_) * K) & 0xffff);
            node = int(path >> G::kHopBits);
        }
        return node;
    }
};

template <int K, bool kForced>
__global__ void __launch_bounds__(kTraceWarps * 32) trace(TraceArgs args) {
    using G = Layout<K>;
    __shared__ uint16_t found[kTraceWarps][256];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int index = blockIdx.x * kTraceWarps + warp;
    const int total = kForced ? *args.n_order : args.count;
    if (index >= total) return;
    const int tile = kForced ? args.order[index] : index;
    const __half* history =
        args.history + index / G::kTiles * G::kHistory + index % G::kTiles;
    const Tracer<K> tracer(history, args.tiles + int64_t(tile) * 256, args.codebook, lane);

    int root = kForced ? args.roots[tile] : tracer.follow(tracer.cheapest_end(), nullptr);
    bool closed = false;
    for (int trial = 0; trial < (kForced ? 1 : kTrials) && !closed; ++trial) {
        const int end = root;
        root = tracer.follow(end, found[warp]);
        closed = root == end;
    }
    if (lane == 0) args.roots[tile] = closed ? -1 : root;
    // A forced pass stays open only where costs overflow or are NaN: the zero ring is closed.
    const bool zero = kForced && !closed;
    __syncwarp();
    for (int t = lane; t < 256; t += 32) {
        const uint32_t state = zero ? 0 : found[warp][t];
        args.states[int64_t(tile) * 256 + t] = int16_t(state);
        args.values[int64_t(tile) * 256 + t] =
            __half2float(codebook_value(state, args.codebook));
    }
}

// Numbers of the open tiles in increasing order, so that results do not depend on timing.
static __global__ void __launch_bounds__(1024) collect_open(const int32_t* roots, int count,
                                                     int32_t* order, int32_t* n_order) {
    __shared__ int warp_counts[32];
    int base = 0;
    for (int first = 0; first < count; first += 1024) {
        const int tile = first + threadIdx.x;
        const bool open = tile < count && roots[tile] >= 0;
        const uint32_t votes = __ballot_sync(0xffffffffu, open);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) warp_counts[warp] = __popc(votes);
        __syncthreads();
        int before = 0, sum = 0;
        for (int i = 0; i < 32; ++i) {
            if (i < warp) before += warp_counts[i];
            sum += warp_counts[i];
        }
        if (open) order[base + before + __popc(votes & ((1u << lane) - 1))] = tile;
        base += sum;
        __syncthreads();
    }
    if (threadIdx.x == 0) *n_order = base;
}

}  // namespace exl3::search
