// y = x W for a few rows, W decoded from the trellis on its way into the tensor cores, with both
// Hadamard transforms, scales and bias: one launch.
//
// Work. A thread block of 8 warps computes one *job*: up to 512 output columns of one k-slice, for
// one row group. Its warps are `across` x k groups; each streams its own tiles and meets the others
// only at the end:
//
//                 64 columns = 4 tiles   A step of a warp is a *quad*: 4 tile rows by kTiles
//              +---+---+---+---+         adjacent tiles (2 from 17 rows on), copied asynchronously
//     64 rows  |   |   |   |   |         into the warp's own ring in shared memory. Lane 4 r + q
//              +---+---+---+---+         owns chunk r (columns r and r + 8) of the tiles of row q:
//              |   |   |   |   |         what it decodes is its fragment of the 16 x k operand of
//              +---+---+---+---+         the tensor cores; the input rows are the k x 8 operand.
//              :               :
//     end of slice -> k groups meet in shared memory -> slices of a cluster in each other's shared
//                     memory, each thread block adding a share of the columns and rows -> further
//                     slices in global memory, where the last to arrive adds -> transform, scale,
//                     store (linear_finish.cuh).
//
// Nobody waits for a block outside its cluster. Cutting into slices and k groups depends on the
// shape of the weight and the number of rows alone, and every sum has a fixed order: the result is
// deterministic, the same on every card, with clusters or (before sm_90) without, and the same
// whatever else is in the launch.
//
// Three arithmetics, chosen by codebook and rows; h is the 32-bit hash of a state:
//   digits  (mul1, <= 2 rows)  value = k (B - 510) + c' with B the sum of the four bytes of h. h
//           goes to the integer tensor cores as it is, four unsigned bytes, against the transformed
//           input as a 23-bit fixed-point number in three signed 8-bit digits (three columns of the
//           operand). int32 sums are exact; rounding comes once, at the end of a slice.
//   halves  (<= 16 rows)  a weight is two float16 against each input twice: nothing is packed.
//           3inst, mcg: value = lo + hi, both halves of the masked hash. mul1: (1024 + B, -1534),
//           which a dot product of bytes with the right start value gives at once; the products
//           cancel exactly in the tensor core, and k and c' follow at the end of a slice.
//   packed  (otherwise)  the exact float16 values of the format, two to a register.
// The first two multiply by the unrounded value, which differs from the format's by at most half a
// float16 ulp (2.1e-4 RMS, like one more rounding of the input). c' sum(input) needs no sum: the
// transformed channels of a block add up to sqrt(128) times its first channel before the transform.
//
// Traffic: the trellis once, x once per job (L2), sums of slices 512 bytes per row, slice and 128
// columns (between multiprocessors, or L2). Bound up to 16 rows: a tile and warp takes 23 to 40
// instructions, and a product of the tensor cores keeps the scheduler from most others for its 6
// cycles (docs/benchmarks.md); then the latencies of start, input transform and final sum.

#pragma once

#include "linear_finish.cuh"
#include "linear_input.cuh"
#include "linear_shape.cuh"

namespace exl3 {

// Sums of this warp's quads, in registers: [tile][rows 8 g ..][column r: rows 2 q, 2 q + 1; column
// r + 8: the same].
template <int Rows, int HalfBits, bool IsMul1>
__device__ __forceinline__ void compute(const LinearParams& p, const LinearMember& m,
                                        const Job& job, char* input, char* ring,
                                        LinearShared& shared, Sums<Rows, IsMul1>& sum) {
    using S = Shape<Rows>;
    using St = Stage<HalfBits, S::kTiles>;
    constexpr Arithmetic kArithmetic = S::arithmetic(IsMul1);
    // Digits of rates with many shifts, and 3inst and mcg with their mask, crowd the logic pipe.
    constexpr bool kManyShifts = HalfBits != 2 && HalfBits != 4 && HalfBits != 8 && HalfBits != 16;
    constexpr bool kBalance = !IsMul1 || (kArithmetic == Arithmetic::kDigits && kManyShifts);
    constexpr bool kIsTwice = S::template is_twice<HalfBits>();
    constexpr int kDepth = S::template depth<HalfBits>();
    constexpr int kTileBytes = 16 * HalfBits;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const Place place(m);
    const int group_quads = (job.quads + place.k_groups - 1) >> (kWarpBits - m.across_bits);
    const int first_quad = place.k_group * group_quads;  // in the slice
    const int tiles_across = 8 * m.column_blocks;
    const int tile = 8 * job.column_block + S::kTiles * place.across;
    const int quads = tile < tiles_across ? max(0, min(group_quads, job.quads - first_quad)) : 0;
    const int64_t row_stride = m.row_bytes;
    ring += warp * (kDepth * St::kBytes);

    // Copies of the next quad into a slot of the ring; every call commits, so that counting works.
    const char* source = static_cast<const char*>(m.trellis) +
                         4 * (job.quad + first_quad) * row_stride + tile * kTileBytes;
    const uint32_t ring_address = shared_address(ring);
    int to_fetch = quads;
    auto fetch = [&](int slot) {
        if (to_fetch > 0) {
            const uint32_t target = ring_address + slot * St::kBytes;
            unroll<(4 * St::kPieces + 31) / 32>([&](auto i) {
                const int piece = 32 * i + lane, row = piece / St::kPieces,
                          at = piece % St::kPieces;
                if (4 * St::kPieces % 32 == 0 || piece < 4 * St::kPieces)
                    copy_async16(target + row * St::kPitch + (at ^ St::flip(row)) * 16,
                                 source + row * row_stride + at * 16);
            });
            source += 4 * row_stride;
            --to_fetch;
        }
        commit_copies();
    };
    // Before the kernel before this one has ended, only the cache may be touched: that kernel may
    // be the one that writes the weights.
    if (quads > 0 && lane < 4) prefetch_l2(source + lane * row_stride, S::kTiles * kTileBytes);
    wait_for_previous_kernel();
    Input<Rows> transformed;
    transformed.ask(p, m, job);
#pragma unroll
    for (int i = 0; i < kDepth - 1; ++i) fetch(i);
    transformed.template finish<kArithmetic, kIsTwice>(p, m, job, input, shared);
    __syncthreads();
    total_input<Rows, kArithmetic, IsMul1>(job, shared);

    const Hash hash = hash_of(IsMul1 ? int(kMul1) : m.codebook);
    const int plane = 8 * job.k_blocks * S::kColumns * 16;
    const char* b_entry = input + entry<S::kColumns>(0, 0, q, r) +
                          (first_quad + (job.quad & 1)) * (4 * S::kColumns * 16);
    const char* my_ring = ring + q * St::kPitch;
    int slot = 0, free_slot = kDepth - 1;

#pragma unroll 1
    for (int step = 0; step < quads; ++step) {
        wait_copies<kDepth - 2>();
        __syncwarp();  // everyone's copies have landed, and everyone has left the free slot
        fetch(free_slot);
        free_slot = slot;
        Chunk<HalfBits> chunk[S::kTiles];
#pragma unroll
        for (int j = 0; j < S::kTiles; ++j)
            chunk[j].load(my_ring + slot * St::kBytes + j * kTileBytes, r, q);
        slot = slot + 1 == kDepth ? 0 : slot + 1;

        // Eight (packed) or four states at a time, tile after tile: products that meet in one
        // accumulator are then far enough apart not to wait for each other.
        constexpr int kSteps = kArithmetic == Arithmetic::kPacked ? 2 : 4;
        uint4 b[S::kGroups], stored[S::kGroups];
        unroll<kSteps>([&](auto h) {
#pragma unroll
            for (int g = 0; g < S::kGroups; ++g) {
                if constexpr (kIsTwice || kArithmetic == Arithmetic::kPacked) {
                    b[g] = *reinterpret_cast<const uint4*>(b_entry + h * plane + g * 128);
                } else {
                    if (h % 2 == 0)
                        stored[g] =
                            *reinterpret_cast<const uint4*>(b_entry + h / 2 * plane + g * 128);
                    const uint32_t low = h % 2 ? stored[g].z : stored[g].x;
                    const uint32_t high = h % 2 ? stored[g].w : stored[g].y;
                    b[g] = {__byte_perm(low, 0, 0x1010), __byte_perm(low, 0, 0x3232),
                            __byte_perm(high, 0, 0x1010), __byte_perm(high, 0, 0x3232)};
                }
            }
            unroll<2>([&](auto i) {
#pragma unroll
                for (int j = 0; j < S::kTiles; ++j) {
                    uint32_t a[4];
                    if constexpr (kArithmetic == Arithmetic::kPacked) {
                        uint32_t v[8];
                        unroll<8>([&](auto s) {
                            v[s] = chunk[j].template hashed<8 * (2 * h + i) + s, kBalance>(hash);
                            if constexpr (!IsMul1) v[s] = two_halves(v[s]);
                        });
                        auto pair = [&](int s) {
                            return IsMul1 ? pair_of_mul1(v[s], v[s + 1])
                                          : pair_of_sums(v[s], v[s + 1]);
                        };
                        a[0] = pair(0), a[1] = pair(4), a[2] = pair(2), a[3] = pair(6);
                    } else {  // rows 2 w, 2 w + 1 (i = 0) or 2 w + 8, 2 w + 9 of columns r, r + 8
                        unroll<4>([&](auto s) {
                            constexpr int position = 8 * h + 2 * i + (s & 1) * 4 + s / 2;
                            const uint32_t x = chunk[j].template hashed<position, kBalance>(hash);
                            a[s] = kArithmetic == Arithmetic::kDigits ? x
                                   : IsMul1 ? centred_mul1<(4 * (h & 1) + s) < 3>(x)
                                            : two_halves(x);
                        });
                    }
#pragma unroll
                    for (int g = 0; g < S::kGroups; ++g)
                        mma(sum[j][g], a, i ? b[g].z : b[g].x, i ? b[g].w : b[g].y);
                }
            });
        });
        b_entry += 4 * S::kColumns * 16;
    }
}

template <int Rows, int HalfBits, bool IsMul1>
__device__ __forceinline__ void run_job(const LinearParams& p, const LinearMember& m,
                                        const LinearBytes& bytes, LinearShared& shared) {
    extern __shared__ __align__(128) char input[];
    char *const ring = input + bytes.ring, *const inbox = input + bytes.inbox;
    const Job job(p, m, Rows, Shape<Rows>::kTiles);
    Sums<Rows, IsMul1> sum = {};
    compute<Rows, HalfBits, IsMul1>(p, m, job, input, ring, shared, sum);
    let_next_kernel_start();  // not before: its blocks would crowd where this kernel's end first
    __syncthreads();          // everyone has left the ring, which becomes the place of the sums
    if (p.cluster > 1 && !bytes.own_inbox) cluster_arrive();
    if constexpr (Rows == 2)
        finish_few<Rows, IsMul1>(p, m, job, ring, inbox, shared, sum);
    else
        finish_many<Rows, IsMul1>(p, m, job, ring, inbox, shared, sum);
}

#define EXL3_FOR_RATES(X) X(2) X(4) X(6) X(8) X(10) X(12) X(14) X(16)
#define EXL3_FOR_HALF_RATES(X) X(3) X(5) X(7)

// One member of known rate and codebook; with Rate = 0 any number of members, of which every job
// looks its own up. The parameters of the one member are operands of instructions; those of a
// looked-up member would be slow loads with an index wherever they are used, so they are copied
// first.
template <int Rows, int Rate, bool IsMul1>
__global__ void __launch_bounds__(kLinearThreads, kBlocksOnSm)
    linear_kernel(const __grid_constant__ LinearParams p,
                  const __grid_constant__ LinearBytes bytes) {
    __shared__ LinearShared shared;
    if (p.cluster > 1 && bytes.own_inbox) cluster_arrive();  // finish_few and finish_many wait
    if constexpr (Rate != 0) {
        run_job<Rows, Rate, IsMul1>(p, p.member[0], bytes, shared);
    } else {
        __shared__ LinearMember m;
        int i = 0;
        while (i + 1 < p.members && blockIdx.x >= p.member[i + 1].first_block) ++i;
        static_assert(sizeof(LinearMember) % 4 == 0 && sizeof(LinearMember) <= 4 * kLinearThreads);
        if (threadIdx.x < sizeof(LinearMember) / 4)
            reinterpret_cast<uint32_t*>(&m)[threadIdx.x] =
                reinterpret_cast<const uint32_t*>(&p.member[i])[threadIdx.x];
        __syncthreads();
#define EXL3_CASE(half_bits, is_mul1)                           \
    case half_bits * 2 + is_mul1:                               \
        run_job<Rows, half_bits, is_mul1>(p, m, bytes, shared); \
        break;
#define EXL3_BOTH(half_bits) EXL3_CASE(half_bits, 0) EXL3_CASE(half_bits, 1)
#define EXL3_MUL1(half_bits) EXL3_CASE(half_bits, 1)
        switch (m.half_bits * 2 + (m.codebook == kMul1)) {
            EXL3_FOR_RATES(EXL3_BOTH)
            EXL3_FOR_HALF_RATES(EXL3_MUL1)
        }
#undef EXL3_MUL1
#undef EXL3_BOTH
#undef EXL3_CASE
    }
}

}  // namespace exl3
