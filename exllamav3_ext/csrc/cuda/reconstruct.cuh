// A whole weight as a matrix: in the rotated basis (decode), or with both Hadamard transforms and
// scales undone (reconstruct).
//
// A thread block takes 128 x 128 weights. Warp w takes tile column w; lane 4 r + q owns chunk r,
// columns r and r + 8, of the tiles in tile rows q and q + 4:
//
//                 tile column w         rows of a chunk: 4 register stages    } 128-point
//               +----------------+      tile rows q = 0..3: 2 shuffle stages  } transform
//      q        | r        r + 8 |      tile rows q, q + 4: 1 register stage  } over rows
//      :        |                |
//      q + 4    |                |      then through shared memory, two threads a row: 6 register
//               +----------------+      stages and 1 shuffle stage over columns
//
// Traffic: the trellis once, the matrix once. Bound: instruction issue (14 butterfly stages), about
// twice the time of writing float16 to memory.

#pragma once

#include "cuda/codec.h"
#include "cuda/hadamard.cuh"
#include "cuda/window.cuh"

namespace exl3 {

// Place of an element in shared memory. Tile rows are moved by multiples of 8 words, for the four
// tile rows that a warp writes at once, and columns 64.. by 16, for the two threads that read a
// row.
inline constexpr int kRowPitch = 180;
__device__ __forceinline__ int at(int row, int column) {
    return row * kRowPitch + column + 8 * ((row >> 4) & 3) + (column >= 64 ? 16 : 0);
}

// Exact values of chunk r of one tile: [column r or r + 8][row].
template <int HalfBits, bool IsMul1>
__device__ __forceinline__ void decode_chunk(const char* tile, int r, const Hash& hash,
                                             float (&v)[2][16]) {
    Chunk<HalfBits> chunk;
    chunk.load(tile, r, 0);
    unroll<16>([&](auto i) {  // pairs of rows, in ring order
        constexpr int w = i / 4, s = 2 * (i % 4);
        const uint32_t x0 = chunk.template hashed<8 * w + s, false>(hash);
        const uint32_t x1 = chunk.template hashed<8 * w + s + 1, false>(hash);
        const float2 pair = __half22float2(
            half2_of(IsMul1 ? pair_of_mul1(x0, x1) : pair_of_sums(two_halves(x0), two_halves(x1))));
        constexpr int column = s / 4, row = 2 * w + (s & 2) * 4;
        v[column][row] = pair.x, v[column][row + 1] = pair.y;
    });
}

template <int N>
__device__ __forceinline__ void butterfly(float (&v)[N]) {
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (!(i & step)) {
                const float a = v[i], b = v[i + step];
                v[i] = a + b;
                v[i + step] = a - b;
            }
}

__device__ __forceinline__ void butterfly_across(float& v, int lanes) {
    v = fmaf(v, threadIdx.x & lanes ? -1.f : 1.f, __shfl_xor_sync(~0u, v, lanes));
}

template <int HalfBits, bool IsMul1>
__global__ void __launch_bounds__(256, 2)
    reconstruct_kernel(const WeightView w, const void* suh, const void* svh, void* out,
                       Float out_type) {
    extern __shared__ __align__(16) float block[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const int tile_row = 8 * blockIdx.y, tile_column = 8 * blockIdx.x;
    const Hash hash = hash_of(IsMul1 ? int(kMul1) : w.codebook);
    float v[2][2][16];  // tile row q or q + 4, column r or r + 8, row
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        decode_chunk<HalfBits, IsMul1>(static_cast<const char*>(w.trellis) +
                                           (tile_row + q + 4 * h) * w.row_bytes +
                                           (tile_column + warp) * (16 * HalfBits),
                                       r, hash, v[h]);
        butterfly(v[h][0]);
        butterfly(v[h][1]);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            butterfly_across(v[0][c][i], 1);
            butterfly_across(v[1][c][i], 1);
            butterfly_across(v[0][c][i], 2);
            butterfly_across(v[1][c][i], 2);
            const float a = v[0][c][i], b = v[1][c][i];
            block[at(16 * q + i, 16 * warp + 8 * c + r)] = a + b;
            block[at(16 * (q + 4) + i, 16 * warp + 8 * c + r)] = a - b;
        }
    __syncthreads();

    const int row = threadIdx.x / 2, half = threadIdx.x & 1, k = 16 * tile_row,
              n = 16 * tile_column;
    float u[64];
    auto* mine = reinterpret_cast<float4*>(block + at(row, 64 * half));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float4 f = mine[i];
        u[4 * i] = f.x, u[4 * i + 1] = f.y, u[4 * i + 2] = f.z, u[4 * i + 3] = f.w;
    }
    butterfly(u);
    const float scale = __half2float(static_cast<const __half*>(suh)[k + row]) / kBlock;
#pragma unroll
    for (int i = 0; i < 64; ++i) butterfly_across(u[i], 1);
#pragma unroll
    for (int i = 0; i < 16; ++i)
        mine[i] = {u[4 * i] * scale, u[4 * i + 1] * scale, u[4 * i + 2] * scale,
                   u[4 * i + 3] * scale};
    __syncthreads();

    const float4 column_scale = load4(svh, n + 4 * lane, Float::kHalf);
    for (int i = warp; i < kBlock; i += 8) {
        const float4 f = *reinterpret_cast<const float4*>(block + at(i, 4 * lane));
        store4(out, int64_t(k + i) * (16 * w.n_tiles) + n + 4 * lane, f * column_scale, out_type);
    }
}

// One warp a tile column of four tile rows; rows leave in pieces of 32 bytes.
template <int HalfBits, bool IsMul1>
__global__ void __launch_bounds__(256) decode_kernel(const WeightView w, void* out) {
    const int lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const int tile_column = blockIdx.x * 8 + threadIdx.x / 32, tile_row = 4 * blockIdx.y + q;
    if (tile_column >= w.n_tiles || tile_row >= w.k_tiles) return;
    float v[2][16];
    decode_chunk<HalfBits, IsMul1>(static_cast<const char*>(w.trellis) + tile_row * w.row_bytes +
                                       tile_column * (16 * HalfBits),
                                   r, hash_of(IsMul1 ? int(kMul1) : w.codebook), v);
    auto* to = static_cast<__half*>(out) + int64_t(16 * tile_row) * (16 * w.n_tiles) +
               16 * tile_column + r;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        to[int64_t(i) * (16 * w.n_tiles)] = __float2half_rn(v[0][i]);
        to[int64_t(i) * (16 * w.n_tiles) + 8] = __float2half_rn(v[1][i]);
    }
}

}  // namespace exl3
