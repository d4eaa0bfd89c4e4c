// The two inner loops of the trellis search, written once for a vector type V.
//
// One step is 65536 candidates per tile: a level minus the weight, squared onto the cost of its
// in-node, minimum over the choices. A vector holds `lanes` out-nodes; the costs of their in-nodes
// come from memory as a broadcast of one float (fan >= lanes) or of `lanes / fan` neighbours:
//
//     K = 2, 16 lanes     lane      0   1   2   3 | 4   5   6   7 | ...  15
//                         in-node   a   b   c   d | a   b   c   d |       d
//                         out-node  a0  b0  c0  d0| a1  b1  c1  d1|       d3
//
// so that one load and no shuffle serves a candidate, and one shuffle puts a finished vector in
// node order: a0 a1 a2 a3 b0 .. d3. That is 3 vector operations for `lanes` candidates (subtract,
// fused multiply-add, minimum), and 1 + 1/tiles loads. The arithmetic bounds the speed; the level
// table (256 KiB) streams from the second cache, once for kGroup tiles.
//
// V has: lanes; load, store, set1, sub, fma(a, a, b), min; expand<n> (broadcast of n floats);
// collect<n> (the shuffle). Costs are never negative, so integer minima on their bits are allowed.
//
// Nothing from the standard library here: an inline function of it compiled with AVX-512 must not
// be what the linker keeps for the whole program.

#pragma once

#include "cpu/viterbi.h"

namespace exl3::viterbi {

template <class V, int K, int tiles>
void step(const float* levels, const float* weights, const float* const* in, float* const* out) {
    constexpr Layout layout{V::lanes};
    constexpr int fan = 1 << K, in_nodes = layout.in_nodes(K), vectors = layout.vectors(K);
    constexpr int width = vectors * V::lanes, stride = choice_stride(K);
    static_assert(padding(K) == 0 || nodes_of_choice(K) % width == 0, "a block lies in one choice");

    typename V::Reg weight[tiles];
    for (int i = 0; i < tiles; ++i) weight[i] = V::set1(weights[i]);
    for (int first = 0; first < nodes(K); first += width) {  // first out-node of the block
        typename V::Reg best[tiles][vectors];
        const int in_node = first >> K;
#pragma GCC unroll 16
        for (int c = 0; c < fan; ++c) {
            typename V::Reg level[vectors];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) level[v] = V::load(levels + v * V::lanes);
            levels += width;
#pragma GCC unroll 4
            for (int i = 0; i < tiles; ++i) {
                const auto before = V::template expand<in_nodes>(in[i] + c * stride + in_node);
#pragma GCC unroll 2
                for (int v = 0; v < vectors; ++v) {
                    const auto distance = V::sub(level[v], weight[i]);
                    const auto cost = V::fma(distance, distance, before);
                    best[i][v] = c == 0 ? cost : V::min(best[i][v], cost);
                }
            }
        }
        const int at = cost_index(K, first);
#pragma GCC unroll 4
        for (int i = 0; i < tiles; ++i)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v)
                V::store(out[i] + at + v * V::lanes, V::template collect<in_nodes>(best[i][v]));
    }
}

// The same candidates for one out-node. `stride` is large for small fans and 1 at K = 8.
template <class V>
float back(const float* levels, const float* costs, int64_t stride, int fan, float weight,
           int* choice) {
    alignas(64) float candidate[1 << kMaxBits];
    for (int c = 0; c < fan; ++c) candidate[c] = costs[c * stride];
    if (fan >= V::lanes) {
        const auto w = V::set1(weight);
        for (int c = 0; c < fan; c += V::lanes) {
            const auto distance = V::sub(V::load(levels + c), w);
            V::store(candidate + c, V::fma(distance, distance, V::load(candidate + c)));
        }
    } else {
        for (int c = 0; c < fan; ++c) {
            const float distance = levels[c] - weight;
            candidate[c] = V::fma1(distance, distance, candidate[c]);
        }
    }
    float best = candidate[0];
    *choice = 0;
    for (int c = 1; c < fan; ++c) {
        if (candidate[c] < best) {
            best = candidate[c];
            *choice = c;
        }
    }
    return best;
}

template <class V>
constexpr Kernels make_kernels() {
    return {{V::lanes},
            {nullptr, step<V, 1, 1>, step<V, 2, 1>, step<V, 3, 1>, step<V, 4, 1>, step<V, 5, 1>,
             step<V, 6, 1>, step<V, 7, 1>, step<V, 8, 1>},
            {nullptr, step<V, 1, kGroup>, step<V, 2, kGroup>, step<V, 3, kGroup>,
             step<V, 4, kGroup>, step<V, 5, kGroup>, step<V, 6, kGroup>, step<V, 7, kGroup>,
             step<V, 8, kGroup>},
            back<V>};
}

}  // namespace exl3::viterbi
