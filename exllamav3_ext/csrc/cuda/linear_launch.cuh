// One kernel and its launch. Included by instances/*.cu only; linear_launch.cu calls what they
// define.

#pragma once

#include "cuda/linear_kernel.cuh"

namespace exl3 {

// One kernel; Rate 0 is the one that looks up rate and codebook of each member.
template <int Rows, int Rate, bool IsMul1>
cudaError_t launch_linear_kernel(const LinearParams& p, int grid, int input, int ring,
                                 cudaStream_t stream) {
    const auto kernel = linear_kernel<Rows, Rate, IsMul1>;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, input + ring);
    if (status != cudaSuccess) return status;
    kernel<<<grid, kLinearThreads, input + ring, stream>>>(p, input);
    return cudaGetLastError();
}

#define EXL3_INSTANTIATE(rows, rate, is_mul1)                                                     \
    template cudaError_t launch_linear_kernel<rows, rate, is_mul1>(const LinearParams&, int, int, \
                                                                   int, cudaStream_t);

}  // namespace exl3
