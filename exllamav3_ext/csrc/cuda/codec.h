// Launches of the codec and layout kernels on CUDA; no torch.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/linear_params.h"

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
// post * P (pre * x) on rows of `blocks` blocks of 128; pre and post may be null.
cudaError_t launch_hadamard(const void* x, const void* pre, const void* post, void* out,
                            int64_t rows, int blocks, Float type, Float pre_type, Float post_type,
                            cudaStream_t s);
// [positions, heads, 2, head_dim] float16 -> q and gate, [positions, heads, head_dim] each.
cudaError_t launch_deinterleave(const void* qg, void* q, void* gate, int64_t heads, int head_dim,
                                cudaStream_t s);

}  // namespace exl3
