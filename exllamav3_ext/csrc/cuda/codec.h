// Launches of the codec and layout kernels on CUDA; no torch.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/linear_params.h"

// X(half bits, whether the codebook is mul1) for every code there is.
#define EXL3_FOR_CODES(X)                                                                    \
    X(2, 0)                                                                                  \
    X(2, 1) X(3, 1) X(4, 0) X(4, 1) X(5, 1) X(6, 0) X(6, 1) X(7, 1) X(8, 0) X(8, 1) X(10, 0) \
        X(10, 1) X(12, 0) X(12, 1) X(14, 0) X(14, 1) X(16, 0) X(16, 1)

namespace exl3 {

struct WeightView {
    const void* trellis;  // 16-byte aligned
    int64_t row_bytes;    // from one tile row to the next
    int k_tiles, n_tiles;
    int half_bits;
    int codebook;
};

// states [tiles, 256] <-> trellis [tiles, 16 K], both contiguous, int16.
cudaError_t launch_pack(const void* states, void* trellis, int64_t tiles, int half_bits,
                        cudaStream_t s);
cudaError_t launch_unpack(const void* trellis, void* states, int64_t tiles, int half_bits,
                          cudaStream_t s);
// Rotated basis, float16 [k, n].
cudaError_t launch_decode(const WeightView& w, void* out, cudaStream_t s);
// Original basis, [k, n] of any type; k and n multiples of 128.
cudaError_t launch_reconstruct(const WeightView& w, const void* suh, const void* svh, void* out,
                               Float out_type, cudaStream_t s);
// The two factors of a product with many rows (columns.cuh): float16 [k, n], k and n multiples of
// 128, and float16 [rows, k].
cudaError_t launch_reconstruct_columns(const WeightView& w, const void* suh, const void* svh,
                                       void* out, cudaStream_t s);
cudaError_t launch_rotate_input(const void* x, const void* suh, void* out, int64_t rows, int k,
                                Float type, cudaStream_t s);
// post * P (pre * x) on rows of `blocks` blocks of 128; pre and post may be null.
cudaError_t launch_hadamard(const void* x, const void* pre, const void* post, void* out,
                            int64_t rows, int blocks, Float type, Float pre_type, Float post_type,
                            cudaStream_t s);
// [positions, heads, 2, head_dim] float16 -> q and gate, [positions, heads, head_dim] each.
cudaError_t launch_deinterleave(const void* qg, void* q, void* gate, int64_t heads, int head_dim,
                                cudaStream_t s);

}  // namespace exl3
