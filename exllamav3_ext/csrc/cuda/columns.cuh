// The two factors of a product with many rows, x W = rotate_input(x) . columns:
//
//     rotate_input(x) = P_k (x suh / s)        columns = s W_inner P_n diag(svh)
//
// s is a power of two near the largest suh, so that both are about as large as x and W. The input
// transform costs a pass over x; in exchange the matrix needs one transform, not two, and that one
// acts on exact float16 values: half of it is a product with +-1 in the tensor cores.
//
// Columns. A warp takes 128 x 128 weights, 8 x 8 tiles, two rows of every tile at a time:
//
//      8 tile columns = 8 sets of accumulators      Lane 4 g + q holds, of tile row g, chunks 2 q
//    +----+----+----+----+----+----+----+----+      and 2 q + 1: columns 2 q, 2 q + 1, 2 q + 8 and
//    |    |    |    |    |    |    |    |    |      2 q + 9, which are its fragment of the 16 x 16
//    +----+----+----+----+----+----+----+----+      operand. The other operand, +-1, transforms
//    :   rows of 8 tile rows = operand rows  :      the 16 columns of a tile; three butterfly
//    +----+----+----+----+----+----+----+----+      stages over accumulators do the tile columns.
//
// A lane then owns 4 adjacent columns of a row: nothing is exchanged and nothing waits.
// Traffic: the trellis once, the matrix once. Bound: writing the matrix.

#pragma once

#include "cuda/codec.h"
#include "cuda/hadamard.cuh"
#include "cuda/window.cuh"

namespace exl3 {

inline constexpr int kColumnWarps = 4;  // of a thread block, below each other
inline constexpr int kColumnThreads = 32 * kColumnWarps;

// The power of two above the largest |suh|, or 1 if that is 0 or not finite. All threads call it.
__device__ __forceinline__ float power_above(const void* suh, int k) {
    __shared__ uint32_t largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    uint32_t pair = 0;  // magnitudes of float16 numbers order like integers
    for (int i = threadIdx.x; i < k / 8; i += blockDim.x) {
        const uint4 u = __ldg(static_cast<const uint4*>(suh) + i);
        for (uint32_t v : {u.x, u.y, u.z, u.w}) pair = __vmaxu2(pair, v & 0x7fff7fffu);
    }
    const uint32_t of_warp = __reduce_max_sync(~0u, max(pair & 0xffffu, pair >> 16));
    if (threadIdx.x % 32 == 0) atomicMax(&largest, of_warp);
    __syncthreads();
    if (largest == 0 || largest >= 0x7c00) return 1.f;
    const float magnitude = __half2float(__ushort_as_half(static_cast<uint16_t>(largest)));
    return __uint_as_float(((__float_as_uint(magnitude) >> 23) + 1) << 23);
}

// Where eight ring positions 8 u .. 8 u + 7 lie among the words of a tile.
template <int HalfBits>
struct Segment {
    static constexpr bool kAligned = HalfBits % 8 == 0;
    static constexpr int kWords = (HalfBits + 7) / 8;
    int before, first, shift;

    __device__ __forceinline__ explicit Segment(int u)
        : first(4 * HalfBits * u / 32), shift(4 * HalfBits * u % 32) {
        before = first == 0 ? tile_words(HalfBits) - 1 : first - 1;
    }

    // Fills what `hashed<0>` .. `hashed<7>` of the chunk look at.
    __device__ __forceinline__ void load(Chunk<HalfBits>& chunk, const uint32_t* tile) const {
        if constexpr (kAligned) {
            chunk.before = tile[before];
#pragma unroll
            for (int i = 0; i < kWords; ++i) chunk.word[i] = tile[first + i];
        } else {  // the last word may be the first after the tile; its bits are then not looked at
            uint32_t raw[kWords + 1];
#pragma unroll
            for (int i = 0; i <= kWords; ++i) raw[i] = tile[first + i];
            chunk.before = __funnelshift_l(raw[0], tile[before], shift);
#pragma unroll
            for (int i = 0; i < kWords; ++i)
                chunk.word[i] = __funnelshift_l(raw[i + 1], raw[i], shift);
        }
    }
};

// A warp's tiles in shared memory.
template <int HalfBits>
struct ColumnTiles {
    static constexpr int kTileBytes = 16 * HalfBits;
    static constexpr int kRowBytes = 8 * kTileBytes;
    static constexpr int kPitch = kRowBytes + 16;  // against bank conflicts of tile rows
    static constexpr int kBytes = 8 * kPitch;
};

template <int HalfBits, bool IsMul1>
__global__ void __launch_bounds__(kColumnThreads, 3)
    columns_kernel(const WeightView w, const void* suh, const void* svh, void* out) {
    using Tiles = ColumnTiles<HalfBits>;
    extern __shared__ __align__(16) char staged[];
    __shared__ float4 scales[32];  // of the 128 columns
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const int tile_row = 8 * (kColumnWarps * blockIdx.y + warp), tile_column = 8 * blockIdx.x;
    const bool has_rows = tile_row < w.k_tiles;
    char* const mine = staged + warp * Tiles::kBytes;
    if (has_rows) {
        constexpr int kPieces = Tiles::kRowBytes / 16;
        const char* source = static_cast<const char*>(w.trellis) + tile_row * w.row_bytes +
                             tile_column * Tiles::kTileBytes;
#pragma unroll 4
        for (int i = lane; i < 8 * kPieces; i += 32)
            copy_async16(shared_address(mine) + i / kPieces * Tiles::kPitch + i % kPieces * 16,
                         source + i / kPieces * w.row_bytes + i % kPieces * 16);
    }
    commit_copies();
    const float power = power_above(suh, 16 * w.k_tiles) * kHadamardScale;
    if (warp == 0) {
        const float4 s = load4(svh, 16 * tile_column + 4 * lane, Float::kHalf);
        scales[lane] = {s.x * power, s.y * power, s.z * power, s.w * power};
    }
    wait_copies<0>();
    __syncthreads();
    if (!has_rows) return;

    // +-1 operand [column of the tile][n]: column n of the result, 2 q + i or 2 q + i + 8 in the
    // accumulators of lane q, is column 4 q + i or 4 q + i + 2 of the tile.
    uint32_t sign[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = 4 * (g >> 1) + 2 * half + (g & 1);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            sign[half][i] = 0x3c003c00u ^ (__popc((2 * q + 8 * i) & column) & 1 ? 0x8000u : 0) ^
                            (__popc((2 * q + 8 * i + 1) & column) & 1 ? 0x80000000u : 0);
    }
    const Hash hash = hash_of(IsMul1 ? int(kMul1) : w.codebook);
    const int64_t width = 16 * w.n_tiles;
    auto* const to = static_cast<uint2*>(out) +
                     (16 * int64_t(tile_row + g) * width + 16 * tile_column + 4 * q) / 4;
#pragma unroll 1
    for (int step = 0; step < 4; ++step) {
        const int word = (step + (g >> 1)) & 3;  // not the same for all: against bank conflicts
        const Segment<HalfBits> even(8 * q + word), odd(8 * q + 4 + word);
        unroll<2>([&](auto p) {  // rows 2 word + 8 p and 2 word + 8 p + 1
            float v[8][2][4];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const auto* tile = reinterpret_cast<const uint32_t*>(mine + g * Tiles::kPitch +
                                                                     c * Tiles::kTileBytes);
                Chunk<HalfBits> a, b;
                even.load(a, tile);
                odd.load(b, tile);
                uint32_t f[4];
                unroll<4>([&](auto i) {
                    constexpr int at = 2 * p + i % 2 + i / 2 * 4;
                    const uint32_t x = a.template hashed<at, false>(hash),
                                   y = b.template hashed<at, false>(hash);
                    f[i] =
                        IsMul1 ? pair_of_mul1(x, y) : pair_of_sums(two_halves(x), two_halves(y));
                });
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    v[c][half][0] = v[c][half][1] = v[c][half][2] = v[c][half][3] = 0;
                    mma(v[c][half], f, sign[half][0], sign[half][1]);
                }
            }
#pragma unroll
            for (int stage = 1; stage < 8; stage *= 2)
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    if (!(c & stage))
#pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            float &low = v[c][i / 4][i % 4], &high = v[c + stage][i / 4][i % 4];
                            const float sum = low + high;
                            high = low - high;
                            low = sum;
                        }
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const float4 s = scales[4 * c + q];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const __half2 low = __floats2half2_rn(v[c][0][2 * row] * s.x,
                                                          v[c][0][2 * row + 1] * s.y);
                    const __half2 high = __floats2half2_rn(v[c][1][2 * row] * s.z,
                                                           v[c][1][2 * row + 1] * s.w);
                    to[(2 * word + 8 * p + row) * (width / 4) + 4 * c] = {bits_of(low),
                                                                          bits_of(high)};
                }
            }
        });
    }
}

// One warp a block of 128 channels, of rows blockIdx.y, blockIdx.y + gridDim.y, ...
__global__ void __launch_bounds__(256)
    rotate_input_kernel(const void* x, const void* suh, void* out, int64_t rows, int k,
                        Float type) {
    const int channel = kBlock * (8 * blockIdx.x + threadIdx.x / 32) + 4 * (threadIdx.x & 31);
    const float inverse = 1.f / power_above(suh, k);
    if (channel >= k) return;
    const float4 s = load4(suh, channel, Float::kHalf);
    const float4 scale = {s.x * inverse, s.y * inverse, s.z * inverse, s.w * inverse};
    with_type(type, [&](auto known) {
        constexpr Float kType = decltype(known)::value;
#pragma unroll 2
        for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
            const float4 v = load4(x, row * k + channel, kType);
            store4(out, row * k + channel, hadamard128(v * scale), Float::kHalf);
        }
    });
}

}  // namespace exl3
