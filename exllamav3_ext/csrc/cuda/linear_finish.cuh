// Output side of the packed linear: from the sums of a thread block to stored results.

#pragma once

#include "linear_shape.cuh"

namespace exl3 {

// Output transform, scale, bias and store of one row of a column block.
__device__ __forceinline__ void finish_row(const LinearParams& p, const LinearMember& m, int row,
                                           int column_block, float4 z, float4 scale) {
    const int channel = 128 * column_block + 4 * (threadIdx.x & 31);
    float4 y = hadamard128(z) * scale;
    if (m.bias) y = y + load4(m.bias, channel, m.bias_type);
    store4(m.out, int64_t(row) * (128 * m.column_blocks) + channel, y, p.out_type);
}

__device__ __forceinline__ float4 output_scale(const LinearMember& m, int column_block) {
    return load4(m.svh, 128 * column_block + 4 * (threadIdx.x & 31), Float::kHalf);
}

// Adds `slices` parts to f, in order. The loads of up to Batch parts are all on their way before the
// first is waited for: what follows the last arrival is latency, and nothing else hides it.
template <int Batch, int N>
__device__ __forceinline__ void add_slices(float4 (&f)[N], const float4* from, int stride,
                                           int slices) {
    for (int first = 0; first < slices; first += Batch) {
        float4 part[Batch][N];
#pragma unroll
        for (int i = 0; i < Batch; ++i)
            if (first + i < slices)
#pragma unroll
                for (int g = 0; g < N; ++g)
                    part[i][g] = __ldcg(from + int64_t(first + i) * stride + g * 32);
#pragma unroll
        for (int i = 0; i < Batch; ++i)
            if (first + i < slices)
#pragma unroll
                for (int g = 0; g < N; ++g) f[g] = f[g] + part[i][g];
    }
}

// One or two rows: the k groups meet in shared memory, then the slices in global memory.
template <int Rows, bool IsMul1>
__device__ __forceinline__ void stage_few(const LinearMember& m, const Job& job, char* ring,
                                          const Sums<Rows, IsMul1>& sum) {
    using S = Shape<Rows>;
    using Sum = typename S::template Sum<IsMul1>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const int k_group = warp / m.warps_across, across = warp - k_group * m.warps_across;
    const int pitch = m.warps_across * (16 * S::kTiles) + 4;  // + 4 against bank conflicts
    auto* mine =
        reinterpret_cast<Sum*>(ring) + k_group * (S::kSums * pitch) + 16 * S::kTiles * across + r;
    const int used = S::arithmetic(IsMul1) == Arithmetic::kDigits ? 3 * job.rows : job.rows;
    __syncthreads();  // everyone has left the ring, which becomes the place of the sums
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = 2 * q + i;
        if (column < used)
#pragma unroll
            for (int j = 0; j < S::kTiles; ++j) {
                mine[column * pitch + 16 * j] = sum[j][0][i];
                mine[column * pitch + 16 * j + 8] = sum[j][0][i + 2];
            }
    }
    __syncthreads();
}

// Columns 4 lane .. 4 lane + 3 of one row and column block of the job: the k groups in order.
template <int Rows, bool IsMul1>
__device__ __forceinline__ float4 job_row(const void* sums, const LinearMember& m,
                                          const LinearShared& shared, int row, int block) {
    using S = Shape<Rows>;
    constexpr Arithmetic kArithmetic = S::arithmetic(IsMul1);
    const int lane = threadIdx.x & 31, pitch = m.warps_across * (16 * S::kTiles) + 4;
    const int k_groups = kLinearWarps / m.warps_across, at = 128 * block + 4 * lane;
    if constexpr (kArithmetic != Arithmetic::kDigits) {
        const float* from = static_cast<const float*>(sums) + row * pitch + at;
        float4 z = *reinterpret_cast<const float4*>(from);
        for (int g = 1; g < k_groups; ++g)
            z = z + *reinterpret_cast<const float4*>(from + g * S::kSums * pitch);
        return z;
    } else {
        const int* total = shared.digit_total[row];
        int4 exact[3];  // sums of (B - 510) digit
#pragma unroll
        for (int digit = 0; digit < 3; ++digit) {
            const int rest = -510 * total[digit];
            exact[digit] = {rest, rest, rest, rest};
        }
        for (int g = 0; g < k_groups; ++g)
#pragma unroll
            for (int digit = 0; digit < 3; ++digit) {
                const int4 a = *reinterpret_cast<const int4*>(
                    static_cast<const int*>(sums) + (g * S::kSums + 3 * row + digit) * pitch + at);
                exact[digit] = {exact[digit].x + a.x, exact[digit].y + a.y, exact[digit].z + a.z,
                                exact[digit].w + a.w};
            }
        auto number = [](int high, int middle, int low) {
            return fmaf(fmaf(float(high), 256.f, float(middle)), 256.f, float(low));
        };
        const float inverse = shared.inverse_scale[row];
        const float rest = kMul1Rest * number(total[2], total[1], total[0]);
        auto finish = [&](int high, int middle, int low) {
            return fmaf(kMul1Scale, number(high, middle, low), rest) * inverse;
        };
        return {
            finish(exact[2].x, exact[1].x, exact[0].x), finish(exact[2].y, exact[1].y, exact[0].y),
            finish(exact[2].z, exact[1].z, exact[0].z), finish(exact[2].w, exact[1].w, exact[0].w)};
    }
}

template <int Rows, bool IsMul1>
__device__ __forceinline__ void finish_few(const LinearParams& p, const LinearMember& m,
                                           const Job& job, char* ring, LinearShared& shared,
                                           const Sums<Rows, IsMul1>& sum) {
    using S = Shape<Rows>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    stage_few<Rows, IsMul1>(m, job, ring, sum);
    // Item = (row, column block), a warp each.
    const int items = job.rows * S::kMaxColumnBlocks;
    const int64_t first_column = int64_t(job.row_group) * m.column_blocks + job.column_block;
    float* const partials =
        p.partials + m.first_partial + first_column * m.slices * (Rows * 128) + 4 * lane;
    auto partial = [&](int row, int block, int slice) {
        return reinterpret_cast<float4*>(partials +
                                         ((block * m.slices + slice) * Rows + row) * 128);
    };
    auto scale = [&](int block) { return output_scale(m, job.column_block + block); };
    for (int item = warp; item < items; item += kLinearWarps) {
        const int row = item / S::kMaxColumnBlocks, block = item % S::kMaxColumnBlocks;
        if (block >= job.column_blocks) continue;
        const float4 z = job_row<Rows, IsMul1>(ring, m, shared, row, block);
        if (m.slices == 1)
            finish_row(p, m, job.row + row, job.column_block + block, z, scale(block));
        else
            __stcg(partial(row, block, job.slice), z);
    }
    if (m.slices == 1) return;

    // Arrive at every column block. The last to arrive sums all slices, its own too, in order.
    __syncthreads();
    if (threadIdx.x < job.column_blocks) {
        int* counter = p.counters + m.first_counter + job.row_group * m.column_blocks +
                       job.column_block + threadIdx.x;
        const bool is_last = atomic_add_acq_rel(counter, 1) == m.slices - 1;
        if (is_last) *counter = 0;  // ready for the next launch
        shared.is_last[threadIdx.x] = is_last;
    }
    __syncthreads();
    for (int item = warp; item < items; item += kLinearWarps) {
        const int row = item / S::kMaxColumnBlocks, block = item % S::kMaxColumnBlocks;
        if (block >= job.column_blocks || !shared.is_last[block]) continue;
        const float4 svh = scale(block);  // asked for before the sums: one latency instead of two
        const float4* from = partial(row, block, 0);
        float4 z[1] = {};
        add_slices<12>(z, from, Rows * 32, m.slices);
        finish_row(p, m, job.row + row, job.column_block + block, z[0], svh);
    }
}

// More rows. Sums stay tensor core fragments: the k groups meet in shared memory, the slices in
// global memory, and the last thread block to arrive adds the slices in order. Only then fragments
// become rows.
template <int Rows, bool IsMul1>
__device__ __forceinline__ void finish_many(const LinearParams& p, const LinearMember& m,
                                            const Job& job, char* ring, LinearShared& shared,
                                            Sums<Rows, IsMul1>& sum) {
    using S = Shape<Rows>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const int k_group = warp / m.warps_across, across = warp - k_group * m.warps_across;
    __syncthreads();  // everyone has left the ring, which becomes the place of the sums
    constexpr int kFragments = S::kTiles * S::kGroups * 32;  // of a warp, float4
    if (m.warps_across < kLinearWarps) {
        auto* const mine = reinterpret_cast<float4*>(ring) + warp * kFragments + lane;
        if (k_group > 0) {
#pragma unroll
            for (int j = 0; j < S::kTiles; ++j)
#pragma unroll
                for (int g = 0; g < S::kGroups; ++g)
                    mine[(j * S::kGroups + g) * 32] = {sum[j][g][0], sum[j][g][1], sum[j][g][2],
                                                       sum[j][g][3]};
        }
        __syncthreads();
        if (k_group == 0) {
            for (int other = m.warps_across; other < kLinearWarps; other += m.warps_across)
#pragma unroll
                for (int j = 0; j < S::kTiles; ++j)
#pragma unroll
                    for (int g = 0; g < S::kGroups; ++g) {
                        const float4 f = mine[other * kFragments + (j * S::kGroups + g) * 32];
                        sum[j][g][0] += f.x, sum[j][g][1] += f.y;
                        sum[j][g][2] += f.z, sum[j][g][3] += f.w;
                    }
        }
        __syncthreads();
    }
    if constexpr (S::arithmetic(IsMul1) == Arithmetic::kHalves && IsMul1) {
#pragma unroll
        for (int g = 0; g < S::kGroups; ++g)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 8 * g + 2 * q + i;
                const float rest = row < job.rows ? shared.row_term[row] : 0;
#pragma unroll
                for (int j = 0; j < S::kTiles; ++j) {
                    sum[j][g][i] = fmaf(kMul1Scale, sum[j][g][i], rest);
                    sum[j][g][i + 2] = fmaf(kMul1Scale, sum[j][g][i + 2], rest);
                }
            }
    }

    const int pitch = m.warps_across * (16 * S::kTiles) + 4;  // + 4 against bank conflicts
    auto* sums = reinterpret_cast<float*>(ring);
    auto stage = [&](int tile, int g, float4 f) {  // fragment of a tile of the job -> [row][column]
        float* at = sums + (8 * g + 2 * q) * pitch + 16 * tile + r;
        at[0] = f.x, at[pitch] = f.y, at[8] = f.z, at[pitch + 8] = f.w;
    };
    if (m.slices == 1) {
        if (k_group == 0) {
#pragma unroll
            for (int j = 0; j < S::kTiles; ++j)
#pragma unroll
                for (int g = 0; g < S::kGroups; ++g)
                    stage(S::kTiles * across + j, g,
                          {sum[j][g][0], sum[j][g][1], sum[j][g][2], sum[j][g][3]});
        }
    } else {
        const int tiles = m.warps_across * S::kTiles, part_size = tiles * (S::kGroups * 32);
        const int64_t group = int64_t(job.row_group) * m.blocks_across + job.block_across;
        auto* const first = reinterpret_cast<float4*>(p.partials + m.first_partial) +
                            group * m.slices * part_size + lane;
        if (k_group == 0) {
            float4* const mine = first + job.slice * part_size + across * kFragments;
#pragma unroll
            for (int j = 0; j < S::kTiles; ++j)
#pragma unroll
                for (int g = 0; g < S::kGroups; ++g)
                    __stcg(mine + (j * S::kGroups + g) * 32,
                           float4{sum[j][g][0], sum[j][g][1], sum[j][g][2], sum[j][g][3]});
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int* counter = p.counters + m.first_counter + group;
            const bool is_last = atomic_add_acq_rel(counter, 1) == m.slices - 1;
            if (is_last) *counter = 0;  // ready for the next launch
            shared.is_last[0] = is_last;
        }
        __syncthreads();
        if (!shared.is_last[0]) return;
        for (int tile = warp; tile < tiles; tile += kLinearWarps) {
            const float4* from = first + tile * (S::kGroups * 32);
            float4 f[S::kGroups] = {};
            add_slices<S::kGroups == 1   ? 16
                       : S::kGroups == 2 ? 9
                                         : 4>(f, from, part_size, m.slices);
#pragma unroll
            for (int g = 0; g < S::kGroups; ++g) stage(tile, g, f[g]);
        }
    }
    __syncthreads();
    for (int item = warp; item < job.rows * S::kMaxColumnBlocks; item += kLinearWarps) {
        const int row = item / S::kMaxColumnBlocks, block = item % S::kMaxColumnBlocks;
        if (block >= job.column_blocks) continue;
        const float4 z =
            *reinterpret_cast<const float4*>(sums + row * pitch + 128 * block + 4 * lane);
        finish_row(p, m, job.row + row, job.column_block + block, z,
                   output_scale(m, job.column_block + block));
    }
}

}  // namespace exl3
