// The CPU kernels that exist once for each instruction set, as a table of functions. They know
// nothing of torch: pointers, sizes, float32. bind_*.cpp checks arguments and brings the threads.

#pragma once

#include <cstdint>

#include "cpu/dispatch.h"

namespace exl3 {

// Decodes `count` tiles, `stride` words apart, to float32 values in ring order (256 each). The
// values are exactly those of the codebook, that is float16 numbers.
using DecodeTiles = void (*)(const uint32_t* words, int64_t stride, int64_t count, float* values);

// One packed product, see linear_impl.h.
struct LinearJob {
    DecodeTiles decode;
    const uint32_t* trellis;  // tile (a, b) begins at trellis + a * row_words + b * tile_words
    int64_t row_words;
    int64_t tile_words;
    int64_t k_tiles;
    int64_t rows;         // of x and y
    const float* x;       // transformed input, arranged by arrange_x
    const float* svh;     // n
    const float* bias;    // n, or null
    float* y;             // rows x n
    int64_t n;
};

// One weight in the original basis, see reconstruct_impl.h; the fields are as above.
struct ReconstructJob {
    DecodeTiles decode;
    const uint32_t* trellis;
    int64_t row_words;
    int64_t tile_words;
    const float* suh;
    const float* svh;
    float* out;  // k x n
    int64_t n;
};
inline constexpr int64_t kReconstructScratch = 128 * 128 + 8 * 256;  // floats

// States of `count` tiles in a row, 256 each.
using UnpackTiles = void (*)(const uint32_t* words, int64_t count, uint16_t* states);

struct Kernels {
    // [half_bits][codebook]; null where the format has no such combination.
    DecodeTiles decode[17][3];

    UnpackTiles unpack[17];  // [half_bits]

    // One tile from ring order to rows of a matrix.
    void (*tile_to_matrix)(const float* values, float* matrix, int64_t stride);
    // The 128 x 128 block at (row_block, column_block).
    void (*reconstruct_block)(const ReconstructJob& job, int64_t row_block, int64_t column_block,
                              float* scratch);

    // x = P x on consecutive blocks of 128, in place.
    void (*hadamard)(float* x, int64_t blocks);

    // Rows that linear_block should get at most: more would not stay in cache.
    int64_t linear_rows;
    // Floats of `rows` arranged rows of k channels; and the function that puts row `row` there.
    int64_t (*arranged_size)(int64_t k, int64_t rows);
    void (*arrange_x)(const float* x, int64_t k, int64_t row, int64_t rows, float* arranged);

    // Columns [128 block, 128 block + 128) of y. `scratch` holds linear_scratch(rows) floats.
    void (*linear_block)(const LinearJob& job, int64_t block, float* scratch);
    int64_t (*linear_scratch)(int64_t rows);

    // One token of one head of the gated delta rule; see delta_rule_impl.h.
    void (*delta_step)(const float* q, const float* k, const float* v, float decay, float beta,
                       int64_t dk, int64_t dv, float* state, float* delta, float* out);

    void (*half_to_float)(const uint16_t* in, int64_t count, float* out);
    void (*float_to_half)(const float* in, int64_t count, uint16_t* out);
};

extern const Kernels kernels_portable;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

inline const Kernels& active_kernels() {
#if defined(__x86_64__)
    switch (active_isa()) {
        case Isa::avx512: return kernels_avx512;
        case Isa::avx2: return kernels_avx2;
        default: break;
    }
#endif
    return kernels_portable;
}

}  // namespace exl3
