// Current CUDA stream and launch checks, for files that bind CUDA kernels (bind_*.cpp).
//
// A strong reference to aoti_torch_get_current_cuda_stream would make the whole `.so`, CPU kernels
// included, unloadable under a CPU build of torch. So it is weak, and checked where it is used.
// torch's own STD_CUDA_CHECK has the same defect; EXL3_CUDA_CHECK needs only the static cudart.

#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "common.h"

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** ret_stream);

#define EXL3_CUDA_CHECK(expression)                                                      \
    do {                                                                                 \
        const cudaError_t exl3_status = (expression);                                    \
        STD_TORCH_CHECK(exl3_status == cudaSuccess, "CUDA error in " #expression ": ",   \
                        cudaGetErrorString(exl3_status));                                \
    } while (false)

namespace exl3 {

// Makes the tensor's device current for the lifetime of the object, and knows its torch stream.
//
//     CudaScope scope(x);
//     launch_kernel(..., scope.stream);
//     EXL3_CUDA_CHECK(cudaGetLastError());
class CudaScope {
  public:
    explicit CudaScope(const Tensor& tensor)
        : device(tensor.get_device_index()), guard_(device), stream(current_stream(device)) {}

    const int32_t device;

  private:
    torch::stable::accelerator::DeviceGuard guard_;

  public:
    const cudaStream_t stream;

  private:
    static cudaStream_t current_stream(int32_t device) {
        STD_TORCH_CHECK(&aoti_torch_get_current_cuda_stream != nullptr,
                        "this torch is a CPU build: it has no CUDA streams");
        void* stream = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
        return static_cast<cudaStream_t>(stream);
    }
};

}  // namespace exl3
