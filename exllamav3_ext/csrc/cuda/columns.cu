#include "cuda/columns.cuh"

#include <algorithm>

namespace exl3 {
namespace {

constexpr int kRotateBlocks = 1024;  // enough for every card, few enough to share the look at suh

template <int HalfBits, bool IsMul1>
cudaError_t launch(const WeightView& w, const void* suh, const void* svh, void* out,
                   cudaStream_t s) {
    constexpr int kBytes = kColumnWarps * ColumnTiles<HalfBits>::kBytes;
    constexpr int kRows = 8 * kColumnWarps;
    const dim3 grid(w.n_tiles / 8, (w.k_tiles + kRows - 1) / kRows);
    const cudaError_t status =
        cudaFuncSetAttribute(columns_kernel<HalfBits, IsMul1>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (status != cudaSuccess) return status;
    columns_kernel<HalfBits, IsMul1><<<grid, kColumnThreads, kBytes, s>>>(w, suh, svh, out);
    return cudaGetLastError();
}

}  // namespace

cudaError_t launch_reconstruct_columns(const WeightView& w, const void* suh, const void* svh,
                                       void* out, cudaStream_t s) {
    switch (w.half_bits * 2 + (w.codebook == kMul1)) {
#define EXL3_CASE(half_bits, is_mul1)    \
    case half_bits * 2 + is_mul1:        \
        return launch<half_bits, is_mul1>(w, suh, svh, out, s);
        EXL3_FOR_CODES(EXL3_CASE)
#undef EXL3_CASE
    }
    return cudaErrorInvalidValue;
}

cudaError_t launch_rotate_input(const void* x, const void* suh, void* out, int64_t rows, int k,
                                Float type, cudaStream_t s) {
    const int across = (k / kBlock + 7) / 8;
    const auto down = static_cast<unsigned>(
        std::min<int64_t>(rows, std::max(kRotateBlocks / across, 1)));
    rotate_input_kernel<<<dim3(across, down), 256, 0, s>>>(x, suh, out, rows, k, type);
    return cudaGetLastError();
}

}  // namespace exl3
