// Launch of the CUDA tile quantizer; includes no torch header. See viterbi_forward.cuh.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace exl3::search {

struct Job {
    const float* tiles;  // (count, 256), ring order
    float* values;       // (count, 256)
    int16_t* states;     // (count, 256)
    int count;
    int codebook;
    void* workspace;  // workspace_bytes(count)
};

// Bytes of scratch that `count` tiles need at once.
int64_t workspace_bytes(int bits, int64_t count);
// Most tiles that fit a workspace of this size, in whole waves of the device's SMs; at least one.
int64_t tiles_that_fit(int bits, int64_t bytes, int sms);
// Five kernels on the stream, no synchronisation.
cudaError_t quantize_tiles(int bits, const Job& job, cudaStream_t stream);

template <int K>
cudaError_t quantize_tiles_k(const Job& job, cudaStream_t stream);

}  // namespace exl3::search
