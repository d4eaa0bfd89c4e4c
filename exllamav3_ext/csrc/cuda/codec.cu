// pack, unpack, Hadamard, deinterleave: one pass over memory each, bound by DRAM; nothing is
// reused.

#include <algorithm>

#include "cuda/codec.h"
#include "cuda/hadamard.cuh"
#include "format.h"

namespace exl3 {
namespace {

constexpr int kThreads = 256;

int blocks_for(int64_t items) {
    return static_cast<int>(std::min<int64_t>((items + kThreads - 1) / kThreads, 1 << 16));
}

// One thread a state.
__global__ void unpack_kernel(const uint32_t* trellis, uint16_t* states, int64_t count,
                              int half_bits) {
    const int words = tile_words(half_bits);
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * kThreads)
        states[i] =
            uint16_t(state_at(trellis + i / kTileWeights * words, half_bits, i % kTileWeights));
}

// One thread a word: the symbols whose bits end in ring bits 32 w .. 32 w + 31, or just after.
__global__ void pack_kernel(const uint16_t* states, uint32_t* trellis, int64_t count,
                            int half_bits) {
    const int words = tile_words(half_bits);
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * kThreads) {
        const uint16_t* tile = states + i / words * kTileWeights;
        const int begin = 32 * int(i % words), end = begin + 32;
        int t = max(0, 2 * begin / half_bits - 2);
        while (window_end(half_bits, t) <= begin) ++t;
        uint32_t word = 0;
        for (; t < kTileWeights; ++t) {
            const int bits = symbol_bits(half_bits, t), shift = end - window_end(half_bits, t);
            if (shift <= -bits) break;
            const uint32_t symbol = tile[t] & ((1u << bits) - 1);
            word |= shift >= 0 ? symbol << shift : symbol >> -shift;
        }
        trellis[i] = word;
    }
}

// One warp a block of 128.
__global__ void hadamard_kernel(const void* x, const void* pre, const void* post, void* out,
                                int64_t count, int blocks, Float type, Float pre_type,
                                Float post_type) {
    const int lane = threadIdx.x & 31;
    for (int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32; i < count;
         i += int64_t(gridDim.x) * (kThreads / 32)) {
        const int channel = 128 * int(i % blocks) + 4 * lane;
        float4 v = load4(x, 128 * i + 4 * lane, type);
        if (pre) v = v * load4(pre, channel, pre_type);
        v = hadamard128(v);
        if (post) v = v * load4(post, channel, post_type);
        store4(out, 128 * i + 4 * lane, v, type);
    }
}

// One thread 16 bytes of the query and 16 of the gate.
__global__ void deinterleave_kernel(const uint4* qg, uint4* q, uint4* gate, int64_t count,
                                    int pieces) {
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
         i += int64_t(gridDim.x) * kThreads) {
        const int64_t head = i / pieces, from = head * pieces + i;
        q[i] = qg[from];
        gate[i] = qg[from + pieces];
    }
}

}  // namespace

cudaError_t launch_unpack(const void* trellis, void* states, int64_t tiles, int half_bits,
                          cudaStream_t s) {
    const int64_t count = tiles * kTileWeights;
    unpack_kernel<<<blocks_for(count), kThreads, 0, s>>>(
        static_cast<const uint32_t*>(trellis), static_cast<uint16_t*>(states), count, half_bits);
    return cudaGetLastError();
}

cudaError_t launch_pack(const void* states, void* trellis, int64_t tiles, int half_bits,
                        cudaStream_t s) {
    const int64_t count = tiles * tile_words(half_bits);
    pack_kernel<<<blocks_for(count), kThreads, 0, s>>>(
        static_cast<const uint16_t*>(states), static_cast<uint32_t*>(trellis), count, half_bits);
    return cudaGetLastError();
}

cudaError_t launch_hadamard(const void* x, const void* pre, const void* post, void* out,
                            int64_t rows, int blocks, Float type, Float pre_type, Float post_type,
                            cudaStream_t s) {
    const int64_t count = rows * blocks;
    hadamard_kernel<<<blocks_for(32 * count), kThreads, 0, s>>>(x, pre, post, out, count, blocks,
                                                                type, pre_type, post_type);
    return cudaGetLastError();
}

cudaError_t launch_deinterleave(const void* qg, void* q, void* gate, int64_t heads, int head_dim,
                                cudaStream_t s) {
    const int pieces = head_dim / 8;
    const int64_t count = heads * pieces;
    deinterleave_kernel<<<blocks_for(count), kThreads, 0, s>>>(
        static_cast<const uint4*>(qg), static_cast<uint4*>(q), static_cast<uint4*>(gate), count,
        pieces);
    return cudaGetLastError();
}

}  // namespace exl3
