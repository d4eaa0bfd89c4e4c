// Puts the table of one instruction set together. Included by kernels_*.cpp after decode_*.h.

#pragma once

#include "cpu/delta_rule_impl.h"
#include "cpu/half.h"
#include "cpu/kernels.h"
#include "cpu/linear_impl.h"
#include "cpu/reconstruct_impl.h"
#include "cpu/unpack_impl.h"

namespace exl3 {
namespace {

void half_to_float_n(const uint16_t* in, int64_t count, float* out) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(
            out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    for (; i < count; ++i) out[i] = half_to_float(in[i]);
}

void float_to_half_n(const float* in, int64_t count, uint16_t* out) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; ++i) out[i] = float_to_half(in[i]);
}

constexpr Kernels make_kernels() {
    Kernels kernels{};
#define EXL3_RATE(half_bits)                                             \
    kernels.unpack[half_bits] = unpack_tiles<half_bits>;                 \
    kernels.decode[half_bits][kInst3] = decode_tiles<half_bits, kInst3>; \
    kernels.decode[half_bits][kMcg] = decode_tiles<half_bits, kMcg>;     \
    kernels.decode[half_bits][kMul1] = decode_tiles<half_bits, kMul1>;
    EXL3_RATE(2)
    EXL3_RATE(4)
    EXL3_RATE(6)
    EXL3_RATE(8)
    EXL3_RATE(10)
    EXL3_RATE(12)
    EXL3_RATE(14)
    EXL3_RATE(16)
#undef EXL3_RATE
    kernels.unpack[3] = unpack_tiles<3>;
    kernels.unpack[5] = unpack_tiles<5>;
    kernels.unpack[7] = unpack_tiles<7>;
    kernels.decode[3][kMul1] = decode_tiles<3, kMul1>;  // half rates go with mul1 only
    kernels.decode[5][kMul1] = decode_tiles<5, kMul1>;
    kernels.decode[7][kMul1] = decode_tiles<7, kMul1>;
    kernels.tile_to_matrix = tile_to_matrix;
    kernels.reconstruct_block = reconstruct_block;
    kernels.hadamard = hadamard_blocks;
    kernels.arranged_size = arranged_size;
    kernels.arrange_x = arrange_x;
    kernels.linear_rows = kPanelRows;
    kernels.linear_block = linear_block;
    kernels.linear_scratch = linear_scratch;
    kernels.delta_step = delta_step;
    kernels.half_to_float = half_to_float_n;
    kernels.float_to_half = float_to_half_n;
    return kernels;
}

}  // namespace
}  // namespace exl3
