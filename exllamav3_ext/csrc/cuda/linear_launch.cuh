// One kernel and its launch. Included by instances/*.cu only; linear_launch.cu calls what they
// define.

#pragma once

#include "cuda/linear_kernel.cuh"

namespace exl3 {

// One kernel; Rate 0 is the one that looks up rate and codebook of each member.
template <int Rows, int Rate, bool IsMul1>
cudaError_t launch_linear_kernel(const LinearParams& p, int grid, LinearBytes bytes,
                                 cudaStream_t stream) {
    const auto kernel = linear_kernel<Rows, Rate, IsMul1>;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes.all);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(kLinearThreads);
    config.dynamicSmemBytes = bytes.all;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = p.has_clusters ? 2 : 0;
    return cudaLaunchKernelEx(&config, kernel, p, bytes);
}

#define EXL3_INSTANTIATE(rows, rate, is_mul1)                                                \
    template cudaError_t launch_linear_kernel<rows, rate, is_mul1>(const LinearParams&, int, \
                                                                   LinearBytes, cudaStream_t);

}  // namespace exl3
