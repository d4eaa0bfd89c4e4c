// Output side of the packed linear: from the sums of a thread block to stored results.

#pragma once

#include "linear_input.cuh"

namespace exl3 {

// Output transform, scale, bias and store of one row of a column block.
template <int Rows>
__device__ __forceinline__ void finish_row(const LinearParams& p, const LinearMember& m, int row,
                                           int column_block, float4 z, float4 scale) {
    const int channel = 128 * column_block + 4 * (threadIdx.x & 31);
    float4 y = hadamard128(z, kHadamardScale / input_scale<Rows>()) * scale;
    if (m.bias) y = y + load4(m.bias, channel, m.bias_type);
    store4(m.out, int64_t(row) * (128 * m.column_blocks) + channel, y, p.out_type);
}

__device__ __forceinline__ float4 output_scale(const LinearMember& m, int column_block) {
    return load4(m.svh, 128 * column_block + 4 * (threadIdx.x & 31), Float::kHalf);
}

__device__ __forceinline__ float4 float4_of(const float (&f)[4]) {
    return {f[0], f[1], f[2], f[3]};
}

// How the slices of a job's columns meet. The first `together` of them are added first, then the
// next; the sums of those last. A cluster adds its `together` slices in shared memory, each block a
// share of the items, and what is left meets in global memory; without clusters all slices do.
struct Meeting {
    int cluster, rank;
    int part, parts;  // what meets in global memory, the number of this block's and of all
    int inner;        // of the parts, added first
    int64_t group;    // of jobs with the same columns and rows
    int* counter;

    __device__ __forceinline__ Meeting(const LinearParams& p, const LinearMember& m, const Job& job)
        : cluster(p.cluster), rank(cluster > 1 ? job.rank : 0) {
        part = job.slice, parts = m.slices, inner = m.together;
        if (cluster > 1) part /= cluster, parts /= cluster, inner = 1;
        group = int64_t(job.row_group) * m.blocks_across + job.block_across;
        counter = p.counters + m.first_counter + group * cluster + rank;
    }
    // Block `item % cluster` adds an item: which that is, and where in its inbox the sum of block
    // `from` stands, in items.
    struct Address {
        int block, place;
    };
    __device__ __forceinline__ Address address(int item, int from) const {
        int place = from;
        for (; item >= cluster; item -= cluster) place += cluster;
        return {item, place};
    }
    // For all threads: everything this block has written to global memory is visible, and this is
    // the last block to arrive.
    __device__ __forceinline__ bool is_last(LinearShared& shared) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            shared.is_last = atomic_add_acq_rel(counter, 1) == parts - 1;
            if (shared.is_last) *counter = 0;  // ready for the next launch
        }
        __syncthreads();
        return shared.is_last;
    }
};

// Sums over `parts` of float4 at N places, `step` apart, the last of which may be missing: every
// `inner` parts first. The loads of up to Batch parts are all on their way before the first is
// waited for: what follows the last arrival is latency, and nothing else hides it.
template <int Batch, int N>
__device__ __forceinline__ void add_parts(float4 (&sum)[N], int places, const float4* from,
                                          int step, int stride, const Meeting& meeting) {
    float4 inner[N] = {};
    int left = meeting.inner;
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] = {};
    for (int first = 0; first < meeting.parts; first += Batch) {
        float4 part[Batch][N];
#pragma unroll
        for (int i = 0; i < Batch; ++i)
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (first + i < meeting.parts && n < places)
                    part[i][n] = __ldcg(from + int64_t(first + i) * stride + n * step);
#pragma unroll
        for (int i = 0; i < Batch; ++i)
            if (first + i < meeting.parts) {
#pragma unroll
                for (int n = 0; n < N; ++n) inner[n] = inner[n] + part[i][n];
                if (--left == 0) {
                    left = meeting.inner;
#pragma unroll
                    for (int n = 0; n < N; ++n) sum[n] = sum[n] + inner[n], inner[n] = {};
                }
            }
    }
}

// The sum of what a cluster's blocks have sent, in order of the slices.
__device__ __forceinline__ float4 add_collected(const float4* from, int stride, int cluster) {
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < kMaxTogether; ++i)
        if (i < cluster) sum = sum + from[i * stride];
    return sum;
}

// Columns of a job, + 4 against bank conflicts.
template <int Rows>
__device__ __forceinline__ int pitch_of(const LinearMember& m) {
    return (16 * Shape<Rows>::kTiles << m.across_bits) + 4;
}

// One or two rows: the k groups meet in shared memory, then the slices in global memory.
template <int Rows, bool IsMul1>
__device__ __forceinline__ void stage_few(const LinearMember& m, const Job& job, char* ring,
                                          const Sums<Rows, IsMul1>& sum) {
    using S = Shape<Rows>;
    using Sum = typename S::template Sum<IsMul1>;
    const int lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3, pitch = pitch_of<Rows>(m);
    const Place place(m);
    auto* mine = reinterpret_cast<Sum*>(ring) + place.k_group * (S::kSums * pitch) +
                 16 * S::kTiles * place.across + r;
    const int used = S::arithmetic(IsMul1) == Arithmetic::kDigits ? 3 * job.rows : job.rows;
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
    const int lane = threadIdx.x & 31, pitch = pitch_of<Rows>(m);
    const int k_groups = kLinearWarps >> m.across_bits, at = 128 * block + 4 * lane;
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
                                           const Job& job, char* ring, char* inbox,
                                           LinearShared& shared, const Sums<Rows, IsMul1>& sum) {
    constexpr int kAcross = Shape<Rows>::kMaxColumnBlocks, kSize = kItemSize<Rows>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Meeting meeting(p, m, job);
    stage_few<Rows, IsMul1>(m, job, ring, sum);
    // Item = (row, column block), a warp each.
    const int items = job.rows * kAcross;
    auto* const collected = reinterpret_cast<float4*>(inbox) + lane;
    if (meeting.cluster > 1) {
        cluster_wait();  // until the inboxes are free
        for (int item = warp; item < items; item += kLinearWarps) {
            const int row = item / kAcross, block = item % kAcross;
            if (block >= job.column_blocks) continue;
            const auto to = meeting.address(item, meeting.rank);
            const uint32_t there =
                address_in_cluster(shared_address(collected + to.place * kSize), to.block);
            store_in_cluster(there, job_row<Rows, IsMul1>(ring, m, shared, row, block));
        }
        cluster_arrive();
    }
    const int size = items_of_job<Rows>(m) * kSize;
    auto* const partials = reinterpret_cast<float4*>(p.partials + m.first_partial) +
                           meeting.group * meeting.parts * size + lane;
    auto for_items = [&](auto&& f) {
        for (int item = meeting.rank + warp * meeting.cluster; item < items;
             item += kLinearWarps * meeting.cluster)
            if (item % kAcross < job.column_blocks) f(item, item / kAcross, item % kAcross);
    };
    // Asked for before the sums: one latency instead of two.
    const int first_block = (meeting.rank + warp * meeting.cluster) % kAcross;
    float4 svh = {};
    if (first_block < job.column_blocks) svh = output_scale(m, job.column_block + first_block);
    if (meeting.cluster > 1) cluster_wait();
    for_items([&](int item, int row, int block) {
        const float4 z = meeting.cluster > 1
                             ? add_collected(collected + meeting.address(item, 0).place * kSize,
                                             kSize, meeting.cluster)
                             : job_row<Rows, IsMul1>(ring, m, shared, row, block);
        if (meeting.parts > 1)
            __stcg(partials + meeting.part * size + item * kSize, z);
        else
            finish_row<Rows>(
                p, m, job.row + row, job.column_block + block, z,
                block == first_block ? svh : output_scale(m, job.column_block + block));
    });
    if (meeting.parts == 1 || !meeting.is_last(shared)) return;
    for_items([&](int item, int row, int block) {
        const float4 svh = output_scale(m, job.column_block + block);
        float4 z[1];
        add_parts<12>(z, 1, partials + item * kSize, 0, size, meeting);
        finish_row<Rows>(p, m, job.row + row, job.column_block + block, z[0], svh);
    });
}

// More rows. Sums stay tensor core fragments until all slices are added.
template <int Rows, bool IsMul1>
__device__ __forceinline__ void finish_many(const LinearParams& p, const LinearMember& m,
                                            const Job& job, char* ring, char* inbox,
                                            LinearShared& shared, Sums<Rows, IsMul1>& sum) {
    using S = Shape<Rows>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const Place place(m);
    const Meeting meeting(p, m, job);
    if (place.k_groups > 1) {
        constexpr int kFragments = S::kTiles * S::kGroups * 32;  // of a warp, float4
        auto* const mine = reinterpret_cast<float4*>(ring) + warp * kFragments + lane;
        if (place.k_group > 0) {
#pragma unroll
            for (int j = 0; j < S::kTiles; ++j)
#pragma unroll
                for (int g = 0; g < S::kGroups; ++g)
                    mine[(j * S::kGroups + g) * 32] = float4_of(sum[j][g]);
        }
        __syncthreads();
        if (place.k_group == 0) {
            const int step = 1 << m.across_bits;
            for (int other = step; other < kLinearWarps; other += step)
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

    // Item = (column block, 8 rows): a fragment of each of 8 tiles.
    constexpr int kSize = kItemSize<Rows>;
    static_assert(kLinearWarps == 8);  // one fragment, later one row, of an item for each warp
    const int items = job.column_blocks * S::kGroups, size = items_of_job<Rows>(m) * kSize;
    auto* const partials = reinterpret_cast<float4*>(p.partials + m.first_partial) +
                           meeting.group * meeting.parts * size + lane;
    float4* const my_part = partials + meeting.part * size;
    auto* const collected = reinterpret_cast<float4*>(inbox) + lane;
    const int pitch = pitch_of<Rows>(m);
    auto* const rows = reinterpret_cast<float*>(ring);  // [row][column]

    auto stage = [&](int item, int tile, float4 f) {
        float* at = rows + (8 * (item % S::kGroups) + 2 * q) * pitch + 128 * (item / S::kGroups) +
                    16 * tile + r;
        at[0] = f.x, at[pitch] = f.y, at[8] = f.z, at[pitch + 8] = f.w;
    };
    // This warp's fragments, all of one column block: f(item, offset of its tiles, fragment).
    const int my_block = S::kTiles * place.across / 8, my_tile = S::kTiles * place.across % 8;
    const bool has_sums = place.k_group == 0 && my_block < job.column_blocks;
    if (meeting.cluster > 1) {
        cluster_wait();  // until the inboxes are free
        if (has_sums) {
#pragma unroll
            for (int g = 0; g < S::kGroups; ++g) {
                const auto to = meeting.address(my_block * S::kGroups + g, meeting.rank);
                const uint32_t there = address_in_cluster(
                    shared_address(collected + to.place * kSize + my_tile * 32), to.block);
#pragma unroll
                for (int j = 0; j < S::kTiles; ++j)
                    store_in_cluster(there + j * 512, float4_of(sum[j][g]));
            }
        }
        cluster_arrive();
    } else if (has_sums) {
#pragma unroll
        for (int g = 0; g < S::kGroups; ++g)
#pragma unroll
            for (int j = 0; j < S::kTiles; ++j) {
                const int item = my_block * S::kGroups + g, tile = my_tile + j;
                if (meeting.parts == 1)
                    stage(item, tile, float4_of(sum[j][g]));
                else
                    __stcg(my_part + item * kSize + tile * 32, float4_of(sum[j][g]));
            }
    }
    // Asked for before the sums: one latency instead of two.
    const int first_block = meeting.rank / S::kGroups;
    float4 svh = {};
    if (first_block < job.column_blocks) svh = output_scale(m, job.column_block + first_block);
    if (meeting.cluster > 1) {
        cluster_wait();
        for (int item = meeting.rank; item < items; item += meeting.cluster) {
            const float4 f =
                add_collected(collected + meeting.address(item, 0).place * kSize + warp * 32, kSize,
                              meeting.cluster);
            if (meeting.parts == 1)
                stage(item, warp, f);
            else
                __stcg(my_part + item * kSize + warp * 32, f);
        }
    }
    if (meeting.parts > 1) {
        if (!meeting.is_last(shared)) return;
        constexpr int kBatch = S::kGroups == 1 ? 16 : S::kGroups == 2 ? 9 : 4;
        for (int item = meeting.rank; item < items; item += S::kGroups * meeting.cluster) {
            float4 f[S::kGroups];
            const int places = (items - item + meeting.cluster - 1) / meeting.cluster;
            add_parts<kBatch>(f, places, partials + item * kSize + warp * 32,
                              meeting.cluster * kSize, size, meeting);
#pragma unroll
            for (int n = 0; n < S::kGroups; ++n)
                if (n < places) stage(item + n * meeting.cluster, warp, f[n]);
        }
    }
    __syncthreads();
    for (int item = meeting.rank; item < items; item += meeting.cluster) {
        const int row = 8 * (item % S::kGroups) + warp, block = item / S::kGroups;
        if (row >= job.rows) continue;
        const float4 z =
            *reinterpret_cast<const float4*>(rows + row * pitch + 128 * block + 4 * lane);
        finish_row<Rows>(p, m, job.row + row, job.column_block + block, z,
                         block == first_block ? svh : output_scale(m, job.column_block + block));
    }
}

}  // namespace exl3
