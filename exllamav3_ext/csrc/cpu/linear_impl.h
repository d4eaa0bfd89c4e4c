// The packed product y = P_n(x W) * svh + bias for one block of 128 output columns; x has already
// been scaled and rotated.
//
// Tiles are decoded to float32 in ring order and used in that order: a vector of consecutive ring
// positions holds rows of one column (4 lanes) or of two columns c and c + 8 (8 and 16 lanes). So
// x is arranged once so that its lanes meet the rows, products are accumulated lane by lane, and
// lanes are added up only after the last tile. Nothing is ever permuted.
//
//     bit of t       7 6 5     4 3          2           1         0
//     means          col & 7   row/2 & 3    col >= 8    row >= 8  row & 1
//     16 lanes       accumulator, x vector (bit 4)
//      8 lanes       accumulator, x vector (bits 4, 3)
//      4 lanes       accumulator, x vector (bits 4, 3), accumulator (bit 2)
//
// For each 8 tiles along k and each of the block's 8 tile columns: decode them (8 KB, in L1), then
// multiply with up to 3 rows of x at a time. So a weight is decoded once for all rows. Each value
// of y is a sum in one fixed order, whatever the number of threads.

#pragma once

#include <algorithm>

#include "format.h"
#include "cpu/hadamard_impl.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace exl3 {
namespace {

inline constexpr int kChunk = 8;                                // k tiles decoded at a time
inline constexpr int kBlockTiles = kBlock / kTile;              // tile columns of a block
inline constexpr int kXVectors = kLanes == 16 ? 2 : 4;          // of one row and k tile
inline constexpr int kAccumulators = kLanes == 4 ? 16 : 8;      // of one row and tile column
inline constexpr int kAccumulatorFloats = kAccumulators * kLanes;
inline constexpr int kXFloats = kXVectors * kLanes;
inline constexpr int kRowsAtOnce = kLanes == 4 ? 2 : 3;         // these two bound the registers
inline constexpr int kAccumulatorsAtOnce = kLanes == 16 ? 8 : 4;

// Rows for which sums (4 KB a row) and a chunk of x (1 KB a row) share the L2 cache; a panel of
// this many rows spends about 4 % of its time on decoding.
inline constexpr int kPanelRows = 96;

inline constexpr int64_t kSumsStride = kBlockTiles * kAccumulatorFloats + 16;  // not a power of 2

// First ring position of the vector that accumulator `a` multiplies with x vector `v`.
constexpr int ring_offset(int a, int v) {
    return kLanes == 4 ? (a >> 1) * 32 + v * 8 + (a & 1) * 4 : (a * kXVectors + v) * kLanes;
}

// x is arranged [chunk of 8 k tiles][row][k tile][x vector][lane], so that what one chunk needs is
// contiguous: rows at a stride of k would fall on the same cache sets.
inline constexpr int64_t kRowFloats = kChunk * kXFloats;

int64_t arranged_size(int64_t k, int64_t rows) {
    return (k / kTile + kChunk - 1) / kChunk * rows * kRowFloats;
}

void arrange_x(const float* x, int64_t k, int64_t row, int64_t rows, float* arranged) {
    for (int64_t tile = 0; tile < k / kTile; ++tile, x += kTile) {
        const int64_t chunk = tile / kChunk, inside = tile % kChunk;
        float* out = arranged + (chunk * rows + row) * kRowFloats + inside * kXFloats;
        for (int v = 0; v < kXVectors; ++v)
            for (int i = 0; i < kLanes; ++i)
                out[v * kLanes + i] = x[tile_row(ring_offset(0, v) + i)];
    }
}

// sums[row][accumulator] += values * x, over `tiles` tiles of one tile column.
template <int Rows>
void multiply(const float* values, int64_t tiles, const float* x, float* sums) {
    for (int first = 0; first < kAccumulators; first += kAccumulatorsAtOnce) {
        F sum[Rows][kAccumulatorsAtOnce];
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
            for (int a = 0; a < kAccumulatorsAtOnce; ++a)
                sum[row][a] = load(sums + row * kSumsStride + (first + a) * kLanes);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const float* value = values + tile * kTileWeights + ring_offset(first, 0);
            const float* x_tile = x + tile * kXFloats;
#pragma GCC unroll 4
            for (int v = 0; v < kXVectors; ++v) {
                F x_row[Rows];
#pragma GCC unroll 4
                for (int row = 0; row < Rows; ++row)
                    x_row[row] = load(x_tile + row * kRowFloats + v * kLanes);
#pragma GCC unroll 8
                for (int a = 0; a < kAccumulatorsAtOnce; ++a) {
                    F w = load(value + ring_offset(a, v));
                    if constexpr (Rows > 1) keep_in_register(w);
#pragma GCC unroll 4
                    for (int row = 0; row < Rows; ++row)
                        sum[row][a] = multiply_add(w, x_row[row], sum[row][a]);
                }
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
            for (int a = 0; a < kAccumulatorsAtOnce; ++a)
                store(sums + row * kSumsStride + (first + a) * kLanes, sum[row][a]);
    }
}

// Adds the lanes of one tile column's accumulators up to its 16 outputs.
EXL3_INLINE void add_lanes(const float* sums, float* columns) {
    for (int a = 0; a < kAccumulators; ++a)
        for (int i = 0; i < kLanes; ++i)
            columns[tile_col(ring_offset(a, 0) + i)] += sums[a * kLanes + i];
}

int64_t linear_scratch(int64_t rows) {
    return kChunk * kTileWeights + rows * kSumsStride;
}

void linear_block(const LinearJob& job, int64_t block, float* scratch) {
    float* values = scratch;
    float* sums = scratch + kChunk * kTileWeights;  // [row][tile column][accumulator][lane]
    std::fill_n(sums, job.rows * kSumsStride, 0.0f);

    const uint32_t* block_words = job.trellis + block * kBlockTiles * job.tile_words;
    for (int64_t tile = 0; tile < job.k_tiles; tile += kChunk) {
        const int64_t tiles = std::min<int64_t>(kChunk, job.k_tiles - tile);
        const uint32_t* chunk_words = block_words + tile * job.row_words;
        for (int64_t column = 0; column < kBlockTiles; ++column) {
            job.decode(chunk_words + column * job.tile_words, job.row_words, tiles, values);
            const float* x = job.x + tile / kChunk * job.rows * kRowFloats;
            float* y = sums + column * kAccumulatorFloats;
            int64_t row = 0;
            // 4 rows are 2 + 2, not 3 + 1: a single row makes poor use of the loads.
            for (; row + kRowsAtOnce <= job.rows && job.rows - row != 4; row += kRowsAtOnce)
                multiply<kRowsAtOnce>(values, tiles, x + row * kRowFloats, y + row * kSumsStride);
            for (; row + 2 <= job.rows; row += 2)
                multiply<2>(values, tiles, x + row * kRowFloats, y + row * kSumsStride);
            if (row < job.rows)
                multiply<1>(values, tiles, x + row * kRowFloats, y + row * kSumsStride);
        }
    }

    for (int64_t row = 0; row < job.rows; ++row) {
        alignas(64) float columns[kBlock] = {};
        for (int64_t column = 0; column < kBlockTiles; ++column)
            add_lanes(sums + row * kSumsStride + column * kAccumulatorFloats,
                      columns + column * kTile);
        hadamard_blocks(columns, 1);
        float* y = job.y + row * job.n + block * kBlock;
        const float* svh = job.svh + block * kBlock;
        for (int i = 0; i < kBlock; ++i) y[i] = columns[i] * svh[i];
        if (job.bias != nullptr)
            for (int i = 0; i < kBlock; ++i) y[i] += job.bias[block * kBlock + i];
    }
}

}  // namespace
}  // namespace exl3
