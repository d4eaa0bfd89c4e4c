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
    const float* x;       // rows of transformed input, each arranged by arrange_x
    const float* svh;     // n
    const float* bias;    // n, or null
    float* y;             // rows x n
    int64_t n;
};

struct Kernels {
    // [half_bits][codebook]; null where the format has no such combination.
    DecodeTiles decode[17][3];

    // y = scale * P x on consecutive blocks of 128, in place.
    void (*hadamard)(float* x, int64_t blocks);

    // Floats that arrange_x writes for one row of k channels, and that function.
    int64_t (*arranged_size)(int64_t k);
    void (*arrange_x)(const float* x, int64_t k, float* arranged);

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
