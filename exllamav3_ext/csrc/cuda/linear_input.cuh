// Input side of the packed linear: x suh P of a job's slice, in the layout of the tensor core
// operand.

#pragma once

#include "linear_shape.cuh"

namespace exl3 {

// Transformed input of the job, x suh P, into shared memory. `ask` issues the loads and comes
// before the copies of weights, behind which they would queue; `finish` does the rest.
//
// Up to two rows: warp w transforms block w of the slice in registers and shuffles, in float32.
template <int Rows>
struct Input {
    using S = Shape<Rows>;
    static_assert(Rows == 2);
    uint4 x[Rows];
    uint2 scale;

    __device__ __forceinline__ void ask(const LinearParams& p, const LinearMember& m,
                                        const Job& job) {
        const int block = threadIdx.x / 32;
        if (block >= job.k_blocks) return;
        const int channel = 128 * (job.k_block + block) + 4 * (threadIdx.x & 31);
        scale = __ldg(static_cast<const uint2*>(m.suh) + channel / 4);
#pragma unroll
        for (int row = 0; row < Rows; ++row)
            if (row < job.rows)
                x[row] =
                    load_raw4(p.x, int64_t(job.row + row) * (128 * p.k_blocks) + channel, p.x_type);
    }

    template <Arithmetic Kind, bool IsTwice>
    __device__ __forceinline__ void finish(const LinearParams& p, const LinearMember&,
                                           const Job& job, char* input, LinearShared& shared) {
        const int block = threadIdx.x / 32, lane = threadIdx.x & 31;
        const bool has_block = block < job.k_blocks;
        float4 value[Rows];
        if (has_block) {
            const float4 suh = float4_of({scale.x, scale.y, 0, 0}, Float::kHalf);
#pragma unroll
            for (int row = 0; row < Rows; ++row) {
                if (row >= job.rows) continue;
                value[row] = hadamard128(float4_of(x[row], p.x_type) * suh);
                if (Kind == Arithmetic::kHalves) {
                    store_halves(input, 8 * job.k_blocks, block, row, value[row]);
                } else {
                    uint32_t bits = 0;
                    for (float f : {value[row].x, value[row].y, value[row].z, value[row].w})
                        bits = max(bits, __float_as_uint(f) & 0x7fffffffu);
                    bits = __reduce_max_sync(~0u, bits);
                    if (lane == 0) shared.largest[row][block] = bits;
                }
            }
        }
        if (Kind == Arithmetic::kHalves) return;
        __syncthreads();
        // The channels of a row share one scale. Sums of digits count the channels of the slice
        // only, which may begin or end in the middle of a block.
        const int quad = 2 * (job.k_block + block) + lane / 16 - job.quad;
        const bool in_slice = quad >= 0 && quad < job.quads;
#pragma unroll
        for (int row = 0; row < Rows; ++row) {
            if (!has_block && lane < 3) shared.digit_sums[row][lane][block] = 0;
            if (row >= job.rows || !has_block) continue;
            const uint32_t bits =
                __reduce_max_sync(~0u, lane < job.k_blocks ? shared.largest[row][lane] : 0);
            const float largest = fmaxf(__uint_as_float(bits), 1e-30f);
            const float scale_up = kLargestInteger / largest;
            if (block == 0 && lane == 0)  // infinities become NaN
                shared.inverse_scale[row] =
                    bits < 0x7f800000u ? largest / kLargestInteger : __int_as_float(-1);
            const float v[4] = {value[row].x, value[row].y, value[row].z, value[row].w};
            int rest[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) rest[j] = __float2int_rn(v[j] * scale_up);
#pragma unroll
            for (int digit = 0; digit < 3; ++digit) {
                int d[4], sum = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    d[j] = static_cast<int8_t>(rest[j] & 0xff);
                    rest[j] = (rest[j] - d[j]) >> 8;
                    sum += d[j];
                }
                store_digit(input, 8 * job.k_blocks, block, 3 * row + digit, d);
                sum = __reduce_add_sync(~0u, in_slice ? sum : 0);
                if (lane == 0) shared.digit_sums[row][digit][block] = sum;
            }
        }
    }

  private:
    static constexpr float kLargestInteger = 8.3e6f;  // below 127 * (65536 + 256 + 1)

    // Channels 4 lane .. 4 lane + 3 of one block and column: two adjacent w, one half of each.
    static __device__ __forceinline__ void store_pairs(char* input, int tile_rows, int block,
                                                       int column, uint2 first, uint2 second) {
        const int lane = threadIdx.x & 31, tile_row = 8 * block + lane / 4, high = (lane & 3) >> 1;
        const int w = 2 * (lane & 1);
        *reinterpret_cast<uint2*>(input + entry<S::kColumns>(w, tile_rows, tile_row, column) +
                                  8 * high) = first;
        *reinterpret_cast<uint2*>(input + entry<S::kColumns>(w + 1, tile_rows, tile_row, column) +
                                  8 * high) = second;
    }
    static __device__ __forceinline__ void store_halves(char* input, int tile_rows, int block,
                                                        int column, float4 v) {
        const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
        store_pairs(input, tile_rows, block, column,
                    {bits_of(__low2half2(a)), bits_of(__high2half2(a))},
                    {bits_of(__low2half2(b)), bits_of(__high2half2(b))});
    }
    static __device__ __forceinline__ void store_digit(char* input, int tile_rows, int block,
                                                       int column, const int (&d)[4]) {
        store_pairs(input, tile_rows, block, column,
                    {__byte_perm(d[0], 0, 0), __byte_perm(d[1], 0, 0)},
                    {__byte_perm(d[2], 0, 0), __byte_perm(d[3], 0, 0)});
    }
};

// More rows: a warp transforms up to 16 rows of a block. H128 = H8 x H16: the 16-point transforms
// within tile rows are products with a constant +-1/16 operand on the tensor cores, the 8-point
// ones across tile rows are additions. x suh is rounded to float16 on the way. The result is
// kManyScale times the orthonormal transform's, which costs no multiplication here and none at the
// end.
inline constexpr float kManyScale = 0.70710678118654752f;  // sqrt(128) / 16

template <int Rows>
    requires(Rows > 2)
struct Input<Rows> {
    using S = Shape<Rows>;
    static constexpr int kGroups = Rows > 8 ? 2 : 1;  // rows r, and r + 8
    uint2 x[8][kGroups];  // tile row, row r + 8 i: channels 4 q .. 4 q + 3
    uint2 scale[8];

    __device__ __forceinline__ void ask(const LinearParams& p, const LinearMember& m,
                                        const Job& job, int item) {
        if (is_split(job))
            ask<1>(p, m, job, item);
        else
            ask<kGroups>(p, m, job, item);
    }
    __device__ __forceinline__ void ask(const LinearParams& p, const LinearMember& m,
                                        const Job& job) {
        ask(p, m, job, threadIdx.x / 32);
    }

    template <Arithmetic Kind, bool IsTwice>
    __device__ __forceinline__ void finish(const LinearParams& p, const LinearMember& m,
                                           const Job& job, char* input, LinearShared& shared) {
        for (int item = threadIdx.x / 32; item < items(job); item += kLinearWarps) {
            if (item >= kLinearWarps) ask(p, m, job, item);
            if (is_split(job))
                transform<Kind, IsTwice, 1>(job, input, shared, item);
            else
                transform<Kind, IsTwice, kGroups>(job, input, shared, item);
        }
    }

  private:
    // One warp's work takes long, so 16 rows are halved where there are warps enough.
    static __device__ __forceinline__ bool is_split(const Job& job) {
        return Rows == 16 && 2 * job.k_blocks <= kLinearWarps;
    }
    static __device__ __forceinline__ int items(const Job& job) {
        return is_split(job) ? 2 * job.k_blocks : job.k_blocks * ((job.rows + 15) / 16);
    }

    template <int Groups>
    __device__ __forceinline__ void ask(const LinearParams& p, const LinearMember& m,
                                        const Job& job, int item) {
        if (item >= items(job)) return;
        const int lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
        const int part = item / job.k_blocks, block = item - part * job.k_blocks;
        const int row = 8 * Groups * part + r;
        const int channel = 128 * (job.k_block + block) + 4 * q, width = 128 * p.k_blocks;
        const auto* suh = static_cast<const uint2*>(m.suh) + channel / 4;
#pragma unroll
        for (int t = 0; t < 8; ++t) scale[t] = __ldg(suh + 4 * t);
        with_type(p.x_type, [&](auto type) {
#pragma unroll
            for (int i = 0; i < Groups; ++i) {
                const bool exists = row + 8 * i < job.rows;
                const Quadruples<decltype(type)::value> from(
                    p.x, int64_t(job.row + (exists ? row + 8 * i : 0)) * width + channel);
#pragma unroll
                for (int t = 0; t < 8; ++t) x[t][i] = exists ? from.halves(4 * t) : uint2{0, 0};
            }
        });
    }

    template <Arithmetic Kind, bool IsTwice, int Groups>
    __device__ __forceinline__ void transform(const Job& job, char* input, LinearShared& shared,
                                              int item) {
        const int lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
        const int part = item / job.k_blocks, block = item - part * job.k_blocks;
        const int column = 8 * Groups * part + r;
        // Operand H16[channel][r] / 16; the channels of a lane, 4 q .., stand where the tensor core
        // expects rows 2 q, 2 q + 1, 2 q + 8, 2 q + 9.
        auto signs = [&](int channel) {
            return 0x2c002c00u ^ ((__popc(channel & r) & 1 ? 0x8000u : 0) |
                                  (__popc((channel + 1) & r) & 1 ? 0x80000000u : 0));
        };
        const uint32_t h0 = signs(4 * q), h1 = signs(4 * q + 2), flip = q >= 2 ? 0x80008000u : 0;
        float v[8][2]
               [4];  // tile row, channels 2 q + 8 .., (row r: 2 q, 2 q + 1), (row r + 8: same)
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            uint32_t a[4] = {};
#pragma unroll
            for (int i = 0; i < Groups; ++i) {
                a[i] = bits_of(__hmul2(half2_of(x[t][i].x), half2_of(scale[t].x)));
                a[2 + i] = bits_of(__hmul2(half2_of(x[t][i].y), half2_of(scale[t].y)));
                if (Kind == Arithmetic::kHalves && t == 0 && q == 0)
                    shared.first_channel[column + 8 * i][block] = __low2float(half2_of(a[i]));
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                v[t][c][0] = v[t][c][1] = v[t][c][2] = v[t][c][3] = 0;
                mma(v[t][c], a, c ? h0 ^ flip : h0, c ? h1 ^ flip : h1);
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int e = 0; e < 2 * Groups; ++e)
#pragma unroll
                for (int step = 1; step < 8; step *= 2)
#pragma unroll
                    for (int t = 0; t < 8; ++t)
                        if (!(t & step)) {
                            const float low = v[t][c][e], high = v[t + step][c][e];
                            v[t][c][e] = low + high;
                            v[t + step][c][e] = low - high;
                        }
        const int tile_rows = 8 * job.k_blocks;
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < Groups; ++i) {
                const float *low = &v[t][0][2 * i], *high = &v[t][1][2 * i];
                auto pair = [](float a, float b) { return bits_of(__floats2half2_rn(a, b)); };
                const int plane = IsTwice ? q : q / 2;
                char* at =
                    input + entry<S::kColumns>(plane, tile_rows, 8 * block + t, column + 8 * i);
                if (IsTwice)  // word q, each channel twice
                    *reinterpret_cast<uint4*>(at) = {pair(low[0], low[0]), pair(low[1], low[1]),
                                                     pair(high[0], high[0]),
                                                     pair(high[1], high[1])};
                else
                    *reinterpret_cast<uint2*>(at + 8 * (q & 1)) = {pair(low[0], low[1]),
                                                                   pair(high[0], high[1])};
            }
    }
};

// The transformed input is this times what the orthonormal transform gives.
template <int Rows>
__host__ __device__ constexpr float input_scale() {
    return Rows > 2 ? kManyScale : 1.f;
}

// What belongs to a row as a whole, in order: the sums of its digits, or c' times the sum of its
// channels. Blocks that two slices share count for the slice that has their first half.
template <int Rows, Arithmetic Kind, bool IsMul1>
__device__ __forceinline__ void total_input(const Job& job, LinearShared& shared) {
    const int i = threadIdx.x;
    if (Kind == Arithmetic::kDigits && i < 6) {
        const int* sums = &shared.digit_sums[0][0][0] + i * kLinearWarps;
        int total = 0;
#pragma unroll
        for (int block = 0; block < kLinearWarps; ++block) total += sums[block];
        (&shared.digit_total[0][0])[i] = total;
    }
    if (Kind == Arithmetic::kHalves && IsMul1 && i < job.rows) {
        float total = 0;
        for (int block = job.quad & 1; block < job.k_blocks; ++block)
            total += shared.first_channel[i][block];
        shared.row_term[i] = total * (kMul1Rest / kHadamardScale * input_scale<Rows>());
    }
}

}  // namespace exl3
