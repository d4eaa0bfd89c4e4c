// One step of the trellis search for one thread block: codebook values in registers, costs in
// shared memory. `Engine<K>` for K >= 2 works on two tiles, the halves of a word; `Engine<1>` on
// one tile, the halves being two neighbouring values of oh (its cost vectors would not fit twice).

#pragma once

#include "viterbi_layout.cuh"

namespace exl3::search {

// (value - w)^2 + cost, of two states of one tile or of one state of two tiles.
__device__ __forceinline__ __half2 branch(__half2 value, __half2 w, __half2 cost) {
    const __half2 d = __hsub2(value, w);
    return __hfma2(d, d, cost);
}

// What a step takes off all costs of a tile: the cost of node 0 before it (up to 4 bits), or the
// least after it (from 5 bits on).
// Each tile of a block decides for itself, so that its result does not depend on its neighbour.
struct Renorm {
    bool first, least_a, least_b;
    __device__ bool least() const { return least_a || least_b; }
};

template <int K>
class Engine {
    using G = Layout<K>;
    static constexpr int kOh = G::HB < 4 ? G::HB : 4;  // consecutive oh of a thread: a group
    static constexpr int kGroups = G::HB / kOh;        // groups lie kThreads groups apart
    static constexpr int kOut = kOh * G::OB;           // consecutive out-nodes of a group
    // Neighbouring in-costs (in c for K=8, in oh for K=2 and 3) are fetched in one wide word.
    static constexpr int kWide = K == 8 ? 4 : kOh;

  public:
    using Cost = __half2;  // of the block's two tiles

    __device__ Engine(int tid, int codebook) {
        const int rest = tid / G::kSplit;
        c0_ = tid % G::kSplit * G::CB;
        ol0_ = rest % (G::C / G::OB) * G::OB;
        oh0_ = rest / (G::C / G::OB) * kOh;
        with_codebook(codebook, [&](auto fixed) { fill<decltype(fixed)::value>(); });
    }

    // Costs `next` from the costs `in`, reduced as `renorm` says; and `keep(node, cost)`.
    template <class Keep>
    __device__ void step(const Cost* in, Cost* next, __half2 w, Renorm renorm, Keep&& keep) {
        const Cost base = in[0];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            Cost out[kOut];
            cheapest(out, in, w, group);
            if constexpr (!G::kOffLeast) {
                if (renorm.first)
#pragma unroll
                    for (int o = 0; o < kOut; ++o) out[o] = __hsub2(out[o], base);
            } else {
                static_assert(kGroups == 1, "the least of all nodes is known after one group");
                if (renorm.least()) {
                    const Cost least = least_cost(out);
                    const Cost off = __halves2half2(
                        renorm.least_a ? __low2half(least) : __ushort_as_half(0),
                        renorm.least_b ? __high2half(least) : __ushort_as_half(0));
#pragma unroll
                    for (int o = 0; o < kOut; ++o) out[o] = __hsub2(out[o], off);
                }
            }
            if (G::kSplit == 1 || c0_ == 0) {
                const int node = oh(group * kOh) * G::C + ol0_;
                store(out, next, node);
#pragma unroll
                for (int o = 0; o < kOut; ++o) keep(node + o, out[o]);
            }
        }
    }

  private:
    int c0_, oh0_, ol0_;
    __half2 values_[64];  // of states (c, oh, ol) and (c, oh, ol + 1)

    template <int kCodebook>
    __device__ void fill() {
#pragma unroll
        for (int h = 0; h < G::HB; ++h)
#pragma unroll
            for (int c = 0; c < G::CB; ++c)
#pragma unroll
                for (int l = 0; l < G::OB; l += 2) {
                    const uint32_t s = (c0_ + c) << (16 - K) | oh(h) << K | (ol0_ + l);
                    value(h, c, l) = __halves2half2(scaled_value<K>(s, kCodebook),
                                                    scaled_value<K>(s + 1, kCodebook));
                }
    }

    __device__ int oh(int h) const { return oh0_ + h / kOh * (kThreads * kOh) + h % kOh; }
    __device__ __half2& value(int h, int c, int l) {
        return values_[((h * G::CB + c) * G::OB + l) / 2];
    }

    __device__ void cheapest(Cost (&out)[kOut], const Cost* in, __half2 w, int group) {
        constexpr int kAlongC = K == 8 ? kWide : 1, kAlongOh = K == 8 ? 1 : kWide;
        static_assert(kAlongOh == kOh || kOh == 1);
#pragma unroll
        for (int c = 0; c < G::CB; c += kAlongC) {
            __align__(16) Cost cost[kWide];
            const Cost* from = in + (c0_ + c) * G::L + G::shared_index(oh(group * kOh));
            if constexpr (kWide == 4)
                *reinterpret_cast<uint4*>(cost) = *reinterpret_cast<const uint4*>(from);
            else if constexpr (kWide == 2)
                *reinterpret_cast<uint2*>(cost) = *reinterpret_cast<const uint2*>(from);
            else
                cost[0] = *from;
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
                const int cj = c + (kAlongC > 1 ? j : 0), h = kAlongOh > 1 ? j : 0;
#pragma unroll
                for (int l = 0; l < G::OB; l += 2) {
                    const __half2 two = value(group * kOh + h, cj, l);
                    const Cost a = branch(__low2half2(two), w, cost[j]);
                    const Cost b = branch(__high2half2(two), w, cost[j]);
                    Cost& best_a = out[h * G::OB + l];
                    Cost& best_b = out[h * G::OB + l + 1];
                    best_a = cj == 0 ? a : __hmin2(best_a, a);
                    best_b = cj == 0 ? b : __hmin2(best_b, b);
                }
            }
        }
#pragma unroll
        for (int distance = 1; distance < G::kSplit; distance *= 2)
#pragma unroll
            for (int o = 0; o < kOut; ++o)
                out[o] = __hmin2(out[o], __shfl_xor_sync(0xffffffffu, out[o], distance));
    }

    __device__ static void store(const Cost (&out)[kOut], Cost* next, int node) {
        if constexpr (kOut % 4 == 0) {
#pragma unroll
            for (int i = 0; i < kOut; i += 4) {
                __align__(16) Cost four[4] = {out[i], out[i + 1], out[i + 2], out[i + 3]};
                *reinterpret_cast<uint4*>(next + G::shared_index(node + i)) =
                    *reinterpret_cast<const uint4*>(four);
            }
        } else {
            static_assert(kOut == 2);
            __align__(8) Cost two[2] = {out[0], out[1]};
            *reinterpret_cast<uint2*>(next + node) = *reinterpret_cast<const uint2*>(two);
        }
    }

    // Least cost of all nodes, tile by tile. Every 16th step, so that its two barriers hardly
    // matter.
    __device__ static Cost least_cost(const Cost (&out)[kOut]) {
        __shared__ Cost of_warp[kThreads / 32];
        Cost best = out[0];
#pragma unroll
        for (int o = 1; o < kOut; ++o) best = __hmin2(best, out[o]);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            best = __hmin2(best, __shfl_xor_sync(0xffffffffu, best, distance));
        __syncthreads();  // of an earlier call
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
        __syncthreads();
        for (const Cost& other : of_warp) best = __hmin2(best, other);
        return best;
    }
};

// K=1: C = 2, and a thread has 32 values of oh in 4 groups of 8 neighbours.
template <>
class Engine<1> {
    using G = Layout<1>;

  public:
    using Cost = __half;

    __device__ Engine(int tid, int codebook) : oh0_(tid * 8) {
        with_codebook(codebook, [&](auto fixed) { fill<decltype(fixed)::value>(); });
    }

    template <class Keep>
    __device__ void step(const Cost* in, Cost* next, __half2 w, Renorm renorm, Keep&& keep) {
        const __half2 base = __half2half2(in[0]);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            __align__(16) __half2 cost[2][4], out[8];
#pragma unroll
            for (int c = 0; c < 2; ++c)
                *reinterpret_cast<uint4*>(cost[c]) =
                    *reinterpret_cast<const uint4*>(in + c * G::L + oh(group * 4));
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                __half2 best[2];  // of ol; the halves are oh and oh + 1
#pragma unroll
                for (int ol = 0; ol < 2; ++ol) {
                    const int i = (group * 4 + h) * 4 + ol;
                    best[ol] = __hmin2(branch(values_[i], w, cost[0][h]),
                                       branch(values_[i + 2], w, cost[1][h]));
                    if (renorm.first) best[ol] = __hsub2(best[ol], base);
                }
                out[2 * h] = __lows2half2(best[0], best[1]);
                out[2 * h + 1] = __highs2half2(best[0], best[1]);
            }
            const int node = oh(group * 4) * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *reinterpret_cast<uint4*>(next + node + 8 * i) =
                    *reinterpret_cast<const uint4*>(out + 4 * i);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                keep(node + 2 * i, __low2half(out[i]));
                keep(node + 2 * i + 1, __high2half(out[i]));
            }
        }
    }

  private:
    int oh0_;
    __half2 values_[64];  // [pair of oh][c][ol], of states (c, oh, ol) and (c, oh + 1, ol)

    template <int kCodebook>
    __device__ void fill() {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const uint32_t s = (i / 2 % 2) << 15 | oh(i / 4) << 1 | (i % 2);
            values_[i] =
                __halves2half2(scaled_value<1>(s, kCodebook), scaled_value<1>(s + 2, kCodebook));
        }
    }

    // First oh of a thread's p-th pair; four pairs are a group.
    __device__ int oh(int p) const { return oh0_ + p / 4 * (kThreads * 8) + p % 4 * 2; }
};

}  // namespace exl3::search
