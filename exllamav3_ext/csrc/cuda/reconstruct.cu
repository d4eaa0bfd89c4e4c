#include "cuda/reconstruct.cuh"

namespace exl3 {

cudaError_t launch_reconstruct(const WeightView& w, const void* suh, const void* svh, void* out,
                               Float out_type, cudaStream_t s) {
    constexpr int kBytes = kBlock * kRowPitch * sizeof(float);
    const dim3 grid(w.n_tiles / 8, w.k_tiles / 8);
    cudaError_t status = cudaErrorInvalidValue;
    switch (w.half_bits * 2 + (w.codebook == kMul1)) {
#define EXL3_CASE(half_bits, is_mul1)                                                       \
    case half_bits * 2 + is_mul1:                                                           \
        status = cudaFuncSetAttribute(reconstruct_kernel<half_bits, is_mul1>,               \
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes); \
        if (status == cudaSuccess)                                                          \
            reconstruct_kernel<half_bits, is_mul1>                                          \
                <<<grid, 256, kBytes, s>>>(w, suh, svh, out, out_type);                     \
        break;
        EXL3_FOR_CODES(EXL3_CASE)
#undef EXL3_CASE
    }
    return status == cudaSuccess ? cudaGetLastError() : status;
}

cudaError_t launch_decode(const WeightView& w, void* out, cudaStream_t s) {
    const dim3 grid((w.n_tiles + 7) / 8, (w.k_tiles + 3) / 4);
    switch (w.half_bits * 2 + (w.codebook == kMul1)) {
#define EXL3_CASE(half_bits, is_mul1)                                   \
    case half_bits * 2 + is_mul1:                                       \
        decode_kernel<half_bits, is_mul1><<<grid, 256, 0, s>>>(w, out); \
        return cudaGetLastError();
        EXL3_FOR_CODES(EXL3_CASE)
#undef EXL3_CASE
    }
    return cudaErrorInvalidValue;
}

}  // namespace exl3
