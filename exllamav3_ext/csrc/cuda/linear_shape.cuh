// How a launch of the packed linear is cut: see linear_kernel.cuh.

#pragma once

#include "hadamard.cuh"
#include "linear_params.h"
#include "window.cuh"

namespace exl3 {

inline constexpr int kWarpBits = 3;
inline constexpr int kLinearWarps = 1 << kWarpBits;
inline constexpr int kLinearThreads = 32 * kLinearWarps;

inline constexpr int kBlocksOnSm = 2;  // thread blocks on a multiprocessor, by their registers

inline constexpr int kMaxRows = 16;  // of the digits and halves arithmetics
// mul1: value = k (1024 + B) + c = k (B - 510) + c'.
inline constexpr float kMul1Rest = static_cast<float>(1534.0 * kMul1Scale + kMul1Offset);

enum class Arithmetic { kDigits, kHalves, kPacked };

template <int Rows>
struct Shape {
    static constexpr int kColumns = Rows < 8 ? 8 : Rows;  // columns of the input operand
    static constexpr int kGroups = kColumns / 8;
    static constexpr int kTiles = Rows <= 16 ? 4 : 2;   // adjacent tiles of a step
    static constexpr int kSums = Rows == 2 ? 6 : Rows;  // columns that are summed
    static constexpr int kMaxColumnBlocks =
        kTiles;  // of 128 columns in a job: 8 warps x kTiles x 16

    static __host__ __device__ constexpr Arithmetic arithmetic(bool is_mul1) {
        return Rows > 16              ? Arithmetic::kPacked
               : Rows == 2 && is_mul1 ? Arithmetic::kDigits
                                      : Arithmetic::kHalves;
    }
    // Bytes of one input channel of one column in shared memory.
    template <int HalfBits>
    static __host__ __device__ constexpr int input_bytes() {
        return is_twice<HalfBits>() ? 4 : 2;
    }
    // Whether the input of the halves stands twice in shared memory. Where wide rates leave too
    // little of it, 16 rows stand once and are doubled in registers.
    template <int HalfBits>
    static __host__ __device__ constexpr bool is_twice() {
        return Rows < 16 || (Rows == 16 && HalfBits <= 12);
    }
    template <bool IsMul1>
    using Sum = std::conditional_t<arithmetic(IsMul1) == Arithmetic::kDigits, int, float>;
    template <int HalfBits>
    static __host__ __device__ constexpr int depth() {
        // Bytes of one warp's ring to aim for. One quad in flight for each of 16 or 24 warps keeps
        // the memory busy; two bring nothing.
        constexpr int fit = (Rows == 8 ? 6656 : 4608) / Stage<HalfBits, kTiles>::kBytes;
        return fit < 2 ? 2 : fit > 8 ? 8 : fit;
    }
};

// Where a warp works: which of the warps side by side it is, and which part of the slice it has.
struct Place {
    int across, k_group, k_groups;
    __device__ __forceinline__ Place(const LinearMember& m) {
        const int warp = threadIdx.x / 32;
        across = warp & ((1 << m.across_bits) - 1), k_group = warp >> m.across_bits;
        k_groups = kLinearWarps >> m.across_bits;
    }
};

// Accumulators of a warp.
template <int Rows, bool IsMul1>
using Sums =
    typename Shape<Rows>::template Sum<IsMul1>[Shape<Rows>::kTiles][Shape<Rows>::kGroups][4];

// Results of a job in items, which the blocks of a cluster divide: of (row, column block) for few
// rows, of (column block, 8 rows) for more.
template <int Rows>
__host__ __device__ constexpr int items_of_job(const LinearMember& m) {
    using S = Shape<Rows>;
    return Rows == 2 ? Rows * S::kMaxColumnBlocks : (S::kTiles << m.across_bits) / 8 * S::kGroups;
}
template <int Rows>
inline constexpr int kItemSize = Rows == 2 ? 32 : 8 * 32;  // float4

// What this thread block computes.
struct Job {
    int slice, rank, row_group, block_across, column_block, column_blocks;
    int row, rows;          // of the row group
    int quad, quads;        // of the slice: 64 channels each
    int k_block, k_blocks;  // blocks of 128 channels that the slice touches

    __device__ __forceinline__ Job(const LinearParams& p, const LinearMember& m, int class_rows,
                                   int tiles) {
        // Slices that are added first are adjacent, then come row groups, columns, further slices.
        // Divisions take long where nothing else can be done, so the usual ones are avoided.
        const unsigned index = blockIdx.x - m.first_block;
        int outer = index / kMaxTogether;
        rank = index % kMaxTogether;
        if (m.together != kMaxTogether) {
            outer = index / m.together;
            rank = index - outer * m.together;
        }
        row_group = 0, block_across = outer, slice = rank;
        if (p.row_groups > 1) {
            block_across = outer / p.row_groups;
            row_group = outer - block_across * p.row_groups;
        }
        if (m.slices != m.together) {
            const int part = block_across / m.blocks_across;
            block_across -= part * m.blocks_across;
            slice += part * m.together;
        }
        column_blocks = (tiles << m.across_bits) / 8;
        column_block = block_across * column_blocks;
        column_blocks = min(column_blocks, m.column_blocks - column_block);
        row = row_group * class_rows;
        rows = min(class_rows, p.rows - row);
        quad = slice * m.slice_quads;
        quads = min(m.slice_quads, 2 * p.k_blocks - quad);
        k_block = quad / 2;
        k_blocks = (quad + quads + 1) / 2 - k_block;
    }
};

// Dynamic shared memory of a thread block: the transformed input from 0, the ring of weights (later
// sums in its place), and the inbox, where the cluster's blocks put the sums this one adds. The
// inbox has its own place, or if that is too much the input's, which is then free only when this
// block has left its loop.
struct LinearBytes {
    int ring, inbox, all;
    bool own_inbox;
};

struct LinearShared {
    uint32_t largest[2][kLinearWarps];   // digits: of (row, block), as float bits
    int digit_sums[2][3][kLinearWarps];  // digits: of (row, digit, block)
    float inverse_scale[2];              // digits: of each row
    float first_channel[kMaxRows][kMaxSliceQuads / 2 + 1];  // halves of mul1: before the transform
    float row_term[kMaxRows];  // c' times the sum of the row, halves of mul1
    int digit_total[2][3];     // digits: of (row, digit)
    int is_last;
};

// Input operand in shared memory: planes of 16-byte entries [tile row][column]. A plane holds, of
// the 16 channels of a tile row, those of words w (halves, digits: one w a plane, 4 bytes a
// channel) or of words 2 h and 2 h + 1 (packed). Columns are permuted against bank conflicts.
template <int Columns>
__device__ __forceinline__ int entry(int plane, int tile_rows, int tile_row, int column) {
    const int swap = Columns >= 8 ? 2 * (tile_row & 3) : 0;
    return ((plane * tile_rows + tile_row) * Columns + (column ^ swap)) * 16;
}

}  // namespace exl3
