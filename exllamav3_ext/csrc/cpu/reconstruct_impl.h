// From tiles to a matrix: tiles laid out in rows, and a 128 x 128 block rotated on both sides.

#pragma once

#include "format.h"
#include "cpu/hadamard_impl.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace exl3 {
namespace {

struct RingOrder {
    uint8_t position[kTileWeights];  // of element 16 * row + col

    constexpr RingOrder() : position{} {
        for (int i = 0; i < kTileWeights; ++i)
            position[i] = uint8_t(ring_position(i / kTile, i % kTile));
    }
};
inline constexpr RingOrder kRingOrder;

void tile_to_matrix(const float* values, float* matrix, int64_t stride) {
    for (int row = 0; row < kTile; ++row)
#pragma GCC unroll 16
        for (int col = 0; col < kTile; ++col)
            matrix[row * stride + col] = values[kRingOrder.position[row * kTile + col]];
}

// Butterflies between `Rows` rows, `step` rows apart, for every column of a 128-wide matrix.
template <int Rows>
EXL3_INLINE void rotate_rows(float* x, int64_t step, float scale) {
    for (int64_t column = 0; column < kBlock; column += kLanes) {
        F v[Rows];
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) v[i] = load(x + i * step * kBlock + column);
#pragma GCC unroll 4
        for (int distance = 1; distance < Rows; distance *= 2)
#pragma GCC unroll 16
            for (int i = 0; i < Rows; ++i) {
                if (i & distance) continue;
                const F a = v[i], b = v[i + distance];
                v[i] = a + b;
                v[i + distance] = a - b;
            }
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) store(x + i * step * kBlock + column, v[i] * scale);
    }
}

void reconstruct_block(const ReconstructJob& job, int64_t row_block, int64_t column_block,
                       float* scratch) {
    constexpr int kTiles = kBlock / kTile;
    float* square = scratch;
    float* values = scratch + kBlock * kBlock;
    for (int64_t tile = 0; tile < kTiles; ++tile) {
        const uint32_t* words = job.trellis + (row_block * kTiles + tile) * job.row_words +
                                column_block * kTiles * job.tile_words;
        job.decode(words, job.tile_words, kTiles, values);
        for (int64_t column = 0; column < kTiles; ++column)
            tile_to_matrix(values + column * kTileWeights,
                           square + tile * kTile * kBlock + column * kTile, kBlock);
    }
    hadamard_blocks(square, kBlock);
    for (int64_t i = 0; i < kBlock; i += 16) rotate_rows<16>(square + i * kBlock, 1, 1.0f);
    for (int64_t i = 0; i < 16; ++i) rotate_rows<8>(square + i * kBlock, 16, kHadamardScale);
    const float* svh = job.svh + column_block * kBlock;
    for (int64_t row = 0; row < kBlock; ++row) {
        const float suh = job.suh[row_block * kBlock + row];
        float* out = job.out + (row_block * kBlock + row) * job.n + column_block * kBlock;
        for (int64_t column = 0; column < kBlock; ++column)
            out[column] = square[row * kBlock + column] * suh * svh[column];
    }
}

}  // namespace
}  // namespace exl3
