// Traceback of the trellis search: one block of 8 warps finds the path of one tile.
//
// Only every kHop-th cost vector is kept. A hop goes from the node after it to the vector before
// it: the 16 - K + kHopBits bits (x, node) spell every state between, so 2^kHopBits paths x are
// evaluated, at most eight a lane, and the cheapest is taken. The latency of reading their costs,
// once a hop, is what limits the kernel; so
//   - the ring is cut in 8 segments, one a warp. Each starts kLookahead positions after its end,
//     from any good node: paths backwards merge, so it is on the right path when it gets there;
//   - where two segments do not meet after all, the lower one is followed again from the right
//     node;
//   - a path that is followed again is left as soon as it meets the recorded one.
//
// Closing the ring: the best end node's path begins in some node, its root. The path that *ends* in
// the root is the candidate; if it also begins there, the ring is closed. If not (2 % of tiles at
// K=4, 12 % at K=2), a forced pass from its root follows, all of whose paths begin in that one
// node.

#pragma once

#include "viterbi_layout.cuh"

namespace exl3::search {

inline constexpr int kSegments = 8;
inline constexpr int kTraceThreads = kSegments * 32;

struct TraceArgs {
    const float* tiles;
    __half* history;
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

// What a block shares: targets, and the path found so far.
template <int K>
struct Path {
    __half targets[256];
    uint16_t states[256];
    uint16_t nodes[Layout<K>::kSlots];  // nodes[i]: before position i * kHop
    uint16_t above[kSegments];          // node from which a segment was recorded
    uint32_t keys[kSegments];
};

template <int K, int kCodebook>
class Tracer {
    using G = Layout<K>;
    static constexpr int kPaths = 1 << G::kHopBits;
    static constexpr int kLookahead = (K <= 2 ? 64 : 32) / G::kHop;  // in hops, like all below
    static constexpr int kSegment = (G::kSlots - 1) / kSegments;

    static constexpr int kEach = kPaths > 32 ? kPaths / 32 : 1;  // paths of a lane
    static constexpr int kLanes = kPaths / kEach;

    const __half* pair_;  // history of the tiles that were searched together
    int half_;            // which of them
    Path<K>& path_;
    int lane_;

  public:
    __device__ Tracer(const __half* history, int tile, Path<K>& path)
        : pair_(history + tile / G::kTiles * G::kHistory),
          half_(tile % G::kTiles),
          path_(path),
          lane_(threadIdx.x % 32) {}

    // All warps: the path from the cheapest of all end nodes.
    __device__ void follow_best() {
        const int segment = threadIdx.x / 32, top = (segment + 1) * kSegment;
        const int start = min(top + kLookahead, G::kSlots - 1);
        const bool last = start == G::kSlots - 1;
        // The true end only for the last; a sample of the nodes is good enough elsewhere.
        uint32_t best = 0xffffffffu;
        for (int i = threadIdx.x; i < G::kNodes; i += kTraceThreads)
            best = min(best, key_of(cost(G::kSlots - 1, i), i));
        best = __reduce_min_sync(0xffffffffu, best);
        if (lane_ == 0) path_.keys[segment] = best;
        __syncthreads();
        if (last) {
            for (int i = 0; i < kSegments; ++i) best = min(best, path_.keys[i]);
        } else {
            best = 0xffffffffu;
            for (int i = lane_; i < min(256, G::kNodes); i += 32)
                best = min(best, key_of(cost(start, i), i));
            best = __reduce_min_sync(0xffffffffu, best);
        }
        int node = node_of_index(best & 0xffff);
        for (int slot = start; slot > top; --slot) node = hop(slot, node, false);
        if (lane_ == 0) path_.above[segment] = uint16_t(node);
        if (lane_ == 0 && segment == kSegments - 1) path_.nodes[G::kSlots - 1] = uint16_t(node);
        for (int slot = top; slot > top - kSegment; --slot) node = hop(slot, node, true);
        __syncthreads();
    }

    // Warp 0: mends the path where segments do not meet. `above` stays what it was recorded from:
    // a segment that has been followed again ends in the recorded node or in nodes[] anew.
    __device__ void join() {
        for (int segment = kSegments - 2; segment >= 0; --segment) {
            const int top = (segment + 1) * kSegment;
            const int node = path_.nodes[top];
            if (node != path_.above[segment]) retrace(top, node);
        }
    }

    // Warp 0: the path that ends in `node`, over the recorded one. Returns its root.
    __device__ int end_in(int node) {
        if (path_.nodes[G::kSlots - 1] != node) {
            __syncwarp();
            if (lane_ == 0) path_.nodes[G::kSlots - 1] = uint16_t(node);
            retrace(G::kSlots - 1, node);
        }
        return path_.nodes[0];
    }

    // Warp 0, after a forced pass from `node`: the recorded path becomes one that ends in `node`,
    // and below the forced positions one that begins in it. Returns its root.
    __device__ int force(int node) {
        end_in(node);
        __syncwarp();
        constexpr int kForced = G::kForcedSteps / G::kHop;
        node = path_.nodes[kForced];
        for (int slot = kForced; slot > 0; --slot) node = hop(slot, node, true);
        return node;
    }

  private:
    __device__ __half cost(int slot, int index) const {
        return pair_[(int64_t(slot) * G::kNodes + index) * G::kTiles + half_];
    }
    __device__ static int node_of_index(int index) {
        if (!G::kSideBySide) return index;
        return (index & (kPaths - 1)) << G::kLowBits | index >> G::kHopBits;
    }

    // From `node` at `slot` down until the path meets the recorded one (or to the start).
    __device__ void retrace(int slot, int node) {
        for (; slot > 0; --slot) {
            const int recorded = path_.nodes[slot - 1];
            __syncwarp();
            node = hop(slot, node, true);
            if (node == recorded) return;
        }
    }

    // Costs of this lane's kEach paths into `node`. Both tiles' lie in one word. All loads must be
    // in flight together, because their latency is the time of a hop.
    __device__ void load(__half (&costs)[kEach], int slot, int node) const {
        const uint32_t first = lane_ % kLanes * kEach;
        constexpr int kWords = (kEach * G::kTiles + 1) / 2;
        __align__(16) uint32_t words[kWords];
        const __half* row = pair_ + int64_t(slot) * G::kNodes * G::kTiles;
        if constexpr (!G::kSideBySide) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int from = int((first + i) << G::kLowBits) | node >> G::kHopBits;
                words[i] = __ldcg(reinterpret_cast<const uint32_t*>(row + from * G::kTiles));
            }
        } else {
            const int from = (node >> G::kHopBits << G::kHopBits) + first;
            const auto* at = reinterpret_cast<const uint32_t*>(row + from * G::kTiles);
            if constexpr (kWords % 4 == 0) {
#pragma unroll
                for (int i = 0; i < kWords; i += 4)
                    *reinterpret_cast<uint4*>(words + i) =
                        __ldcg(reinterpret_cast<const uint4*>(at + i));
            } else {
#pragma unroll
                for (int i = 0; i < kWords; ++i) words[i] = __ldcg(at + i);
            }
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const uint32_t word = words[i * G::kTiles / 2];
            const bool high = G::kTiles == 2 ? half_ : i % 2;
            costs[i] = __ushort_as_half(uint16_t(high ? word >> 16 : word));
        }
    }

    // Cheapest in-node, at `slot` - 1, of `node` at `slot`.
    __device__ int hop(int slot, int node, bool record) {
        const int t = (slot - 1) * G::kHop;
        __half costs[kEach];
        load(costs, slot - 1, node);
        uint32_t best = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const uint32_t x = lane_ % kLanes * kEach + i;
            const uint32_t string = x << (16 - K) | node;
#pragma unroll
            for (int j = 0; j < G::kHop; ++j) {
                const uint32_t state = string >> ((G::kHop - 1 - j) * K) & 0xffff;
                const __half d = __hsub(scaled_value<K>(state, kCodebook), path_.targets[t + j]);
                costs[i] = __hfma(d, d, costs[i]);
            }
            best = min(best, key_of(costs[i], x));
        }
        const uint32_t x = __reduce_min_sync(0xffffffffu, best) & (kPaths - 1);
        const uint32_t string = x << (16 - K) | node;
        node = int(string >> G::kHopBits);
        if (record && lane_ < G::kHop) {
            path_.states[t + lane_] = uint16_t(string >> ((G::kHop - 1 - lane_) * K) & 0xffff);
            if (lane_ == 0) path_.nodes[slot - 1] = uint16_t(node);
        }
        return node;
    }
};

// Finds the path of a tile; returns whether its ring is closed, and its root.
template <int K, int kCodebook>
__device__ bool find_path(Path<K>& path, const __half* history, int tile, int forced_root,
                          int& root) {
    Tracer<K, kCodebook> tracer(history, tile, path);
    if (forced_root >= 0) {
        if (threadIdx.x >= 32) return false;
        root = tracer.force(forced_root);
        return root == forced_root;
    }
    tracer.follow_best();
    if (threadIdx.x >= 32) return false;
    tracer.join();
    __syncwarp();
    const int end = path.nodes[0];
    root = tracer.end_in(end);
    return root == end;
}

template <int K, bool kForced>
__global__ void __launch_bounds__(kTraceThreads) trace(TraceArgs args) {
    __shared__ Path<K> path;
    __shared__ bool zero;
    const int total = kForced ? *args.n_order : args.count;
    if (blockIdx.x >= total) return;
    const int tile = kForced ? args.order[blockIdx.x] : blockIdx.x;
    const int64_t at = int64_t(tile) * 256 + threadIdx.x;
    path.targets[threadIdx.x] = scaled_target<K>(args.tiles[at]);
    const int forced_root = kForced ? args.roots[tile] : -1;
    if constexpr (kForced) {  // the path that stayed open
        using G = Layout<K>;
        const uint32_t state = uint16_t(args.states[at]);
        path.states[threadIdx.x] = uint16_t(state);
        if (threadIdx.x % G::kHop == 0) path.nodes[threadIdx.x / G::kHop] = uint16_t(state >> K);
        if (threadIdx.x == 255) path.nodes[G::kSlots - 1] = uint16_t(state & (G::kNodes - 1));
    }
    __syncthreads();

    with_codebook(args.codebook, [&](auto codebook) {
        int root = 0;
        const bool closed = find_path<K, decltype(codebook)::value>(
            path, args.history, tile, forced_root, root);
        if (threadIdx.x != 0) return;
        args.roots[tile] = closed ? -1 : root;
        // A forced pass stays open only where costs overflow: then the ring of zeros is taken.
        zero = kForced && !closed;
    });
    __syncthreads();
    const uint32_t state = zero ? 0 : path.states[threadIdx.x];
    args.states[at] = int16_t(state);
    args.values[at] = __half2float(codebook_value(state, args.codebook));
}

// Numbers of the open tiles in increasing order, so that results do not depend on timing.
static __global__ void __launch_bounds__(1024)
    collect_open(const int32_t* roots, int count, int32_t* order, int32_t* n_order) {
    __shared__ int warp_counts[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int base = 0;
    for (int first = 0; first < count; first += 1024) {
        const int tile = first + threadIdx.x;
        const bool open = tile < count && roots[tile] >= 0;
        const uint32_t votes = __ballot_sync(0xffffffffu, open);
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
