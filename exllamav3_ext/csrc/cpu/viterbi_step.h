// The inner loops of the trellis search, written once for a vector type V.
//
// One step is 65536 candidates per tile: a level minus the weight, squared onto the cost of its
// in-node, minimum over the choices; 3 vector operations for V::lanes candidates. The levels
// (256 KiB) stream from the second cache, once for kGroup tiles. The third operand comes from
// memory within the multiply-add, because loading it apart costs as much as an operation:
//
//   wide_step, fan >= lanes: a vector is `lanes` out-nodes of one in-node, whose cost is broadcast;
//   narrow_step, fan < lanes: a vector is one out-node each of `lanes` neighbouring in-nodes. The
//     fan vectors of a block are interleaved at the end, K stages of one shuffle per vector:
//
//       K = 1, 4 lanes:   a0 b0 c0 d0     ->   a0 a1 b0 b1      (letter: in-node, digit: the
//                         a1 b1 c1 d1          c0 c1 d0 d1       symbol that leads out of it)
//
// V has: lanes, max_vectors; load, store, set1, broadcast (of a float in memory), sub, min,
// fma(a, a, b) and fma1 for scalars, equal_mask, interleave. Costs are never negative, so integer
// minima on their bits are allowed.
//
// Nothing from the standard library here: an inline function of it compiled with AVX-512 must not
// be what the linker keeps for the whole program.

#pragma once

#include "cpu/viterbi.h"

namespace exl3::viterbi {

template <class V, int K, int tiles>
void narrow_step(const float* levels, const float* weights, const float* const* in,
                 float* const* out) {
    constexpr int fan = 1 << K, stride = choice_stride(K);
    static_assert(nodes_of_choice(K) % (V::lanes * fan) == 0, "a block lies in one choice");

    typename V::Reg weight[tiles];
    for (int i = 0; i < tiles; ++i) weight[i] = V::set1(weights[i]);
    for (int in_node = 0; in_node < nodes_of_choice(K); in_node += V::lanes) {
        typename V::Reg best[tiles][fan];
#pragma GCC unroll 8
        for (int symbol = 0; symbol < fan; ++symbol)
#pragma GCC unroll 8
            for (int c = 0; c < fan; ++c) {
                const auto level = V::load(levels);
                levels += V::lanes;
#pragma GCC unroll 4
                for (int i = 0; i < tiles; ++i) {
                    const auto distance = V::sub(level, weight[i]);
                    const auto cost =
                        V::fma(distance, distance, V::load(in[i] + c * stride + in_node));
                    best[i][symbol] = c == 0 ? cost : V::min(best[i][symbol], cost);
                }
            }
        const int at = cost_index(K, in_node << K);
#pragma GCC unroll 4
        for (int i = 0; i < tiles; ++i) {
#pragma GCC unroll 3
            for (int stage = 0; stage < K; ++stage) {
                typename V::Reg next[fan];
#pragma GCC unroll 4
                for (int j = 0; j < fan / 2; ++j)
                    V::interleave(best[i][j], best[i][j + fan / 2], next[2 * j], next[2 * j + 1]);
#pragma GCC unroll 8
                for (int j = 0; j < fan; ++j) best[i][j] = next[j];
            }
#pragma GCC unroll 8
            for (int j = 0; j < fan; ++j) V::store(out[i] + at + j * V::lanes, best[i][j]);
        }
    }
}

template <class V, int K, int tiles>
void wide_step(const float* levels, const float* weights, const float* const* in,
               float* const* out) {
    constexpr int fan = 1 << K, stride = choice_stride(K), unrolled = fan < 16 ? fan : 16;
    constexpr int vectors = Layout{V::lanes, V::max_vectors}.vectors(K), width = vectors * V::lanes;
    static_assert(padding(K) == 0 || nodes_of_choice(K) % width == 0, "a block lies in one choice");

    typename V::Reg weight[tiles];
    for (int i = 0; i < tiles; ++i) weight[i] = V::set1(weights[i]);
    for (int first = 0; first < nodes(K); first += width) {  // first out-node of the block
        typename V::Reg best[tiles][vectors];
        for (int i = 0; i < tiles; ++i)
            for (int v = 0; v < vectors; ++v) best[i][v] = V::set1(__builtin_inff());
        for (int chunk = 0; chunk < fan; chunk += unrolled)
#pragma GCC unroll 16
            for (int c = chunk; c < chunk + unrolled; ++c) {
                typename V::Reg level[vectors];
#pragma GCC unroll 2
                for (int v = 0; v < vectors; ++v) level[v] = V::load(levels + v * V::lanes);
                levels += width;
#pragma GCC unroll 4
                for (int i = 0; i < tiles; ++i) {
                    const auto before = V::broadcast(in[i] + c * stride + (first >> K));
#pragma GCC unroll 2
                    for (int v = 0; v < vectors; ++v) {
                        const auto distance = V::sub(level[v], weight[i]);
                        best[i][v] = V::min(best[i][v], V::fma(distance, distance, before));
                    }
                }
            }
        const int at = cost_index(K, first);
#pragma GCC unroll 4
        for (int i = 0; i < tiles; ++i) {
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) V::store(out[i] + at + v * V::lanes, best[i][v]);
            // Mostly a mark, and so memory that no cache holds: 4 lines ahead hides it.
            __builtin_prefetch(out[i] + at + 64, 1);
        }
    }
}

template <class V, int K, int tiles>
void step(const float* levels, const float* weights, const float* const* in, float* const* out) {
    if constexpr ((1 << K) < V::lanes)
        narrow_step<V, K, tiles>(levels, weights, in, out);
    else
        wide_step<V, K, tiles>(levels, weights, in, out);
}

// The same candidates for one out-node, whose in-nodes are `stride` apart.
template <class V>
float back(const float* levels, const float* costs, int64_t stride, int fan, float weight,
           int* choice) {
    if (fan < V::lanes) {  // no branch to predict: the order of these costs is random
        float best = __builtin_inff();
        int best_choice = 0;
        for (int c = 0; c < fan; ++c) {
            const float distance = levels[c] - weight;
            const float cost = V::fma1(distance, distance, costs[c * stride]);
            best_choice = cost < best ? c : best_choice;
            best = cost < best ? cost : best;
        }
        *choice = best_choice;
        return best;
    }
    alignas(64) float candidate[1 << kMaxBits];
    for (int c = 0; c < fan; ++c) candidate[c] = costs[c * stride];
    const auto w = V::set1(weight);
    auto least = V::set1(__builtin_inff());
    for (int c = 0; c < fan; c += V::lanes) {
        const auto distance = V::sub(V::load(levels + c), w);
        const auto cost = V::fma(distance, distance, V::load(candidate + c));
        least = V::min(least, cost);
        V::store(candidate + c, cost);
    }
    alignas(64) float lane[V::lanes];
    V::store(lane, least);
    float best = lane[0];
    for (int l = 1; l < V::lanes; ++l) best = lane[l] < best ? lane[l] : best;
    int c = 0;
    unsigned equal;
    while ((equal = V::equal_mask(V::load(candidate + c), V::set1(best))) == 0) c += V::lanes;
    *choice = c + __builtin_ctz(equal);
    return best;
}

template <class V>
constexpr Kernels make_kernels() {
    return {{V::lanes, V::max_vectors},
            {nullptr, step<V, 1, 1>, step<V, 2, 1>, step<V, 3, 1>, step<V, 4, 1>, step<V, 5, 1>,
             step<V, 6, 1>, step<V, 7, 1>, step<V, 8, 1>},
            {nullptr, step<V, 1, kGroup>, step<V, 2, kGroup>, step<V, 3, kGroup>,
             step<V, 4, kGroup>, step<V, 5, kGroup>, step<V, 6, kGroup>, step<V, 7, kGroup>,
             step<V, 8, kGroup>},
            back<V>};
}

}  // namespace exl3::viterbi
