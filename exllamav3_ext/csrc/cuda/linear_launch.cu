// Chooses the kernel of a launch. The kernels themselves are compiled in instances/*.cu.

#include <algorithm>

#include "cuda/linear_sizes.cuh"

namespace exl3 {

template <int Rows, int Rate, bool IsMul1>
cudaError_t launch_linear_kernel(const LinearParams&, int grid, int input, int ring, cudaStream_t);

template <int Rows>
cudaError_t launch_linear_rows(const LinearParams& p, int grid, cudaStream_t stream) {
    size_t input_size = 0, ring_size = 0;
    for (int i = 0; i < p.members; ++i) {
        input_size = std::max(input_size, input_bytes<Rows>(p.member[i]));
        ring_size = std::max(ring_size, ring_bytes<Rows>(p.member[i]));
    }
    const int input = static_cast<int>(input_size), ring = static_cast<int>(ring_size);
    if (p.members > 1) return launch_linear_kernel<Rows, 0, false>(p, grid, input, ring, stream);
    switch (p.member[0].half_bits * 2 + (p.member[0].codebook == kMul1)) {
#define EXL3_MUL1(h) \
    case h * 2 + 1:  \
        return launch_linear_kernel<Rows, h, true>(p, grid, input, ring, stream);
#define EXL3_BOTH(h)                                                               \
    case h * 2:                                                                    \
        return launch_linear_kernel<Rows, h, false>(p, grid, input, ring, stream); \
        EXL3_MUL1(h)
        EXL3_FOR_RATES(EXL3_BOTH)
        EXL3_FOR_HALF_RATES(EXL3_MUL1)
#undef EXL3_BOTH
#undef EXL3_MUL1
    }
    return cudaErrorInvalidValue;
}

cudaError_t launch_linear(const LinearParams& params, const LinearPlan& plan, cudaStream_t stream) {
    switch (plan.row_class) {
        case 2:
            return launch_linear_rows<2>(params, plan.grid, stream);
        case 8:
            return launch_linear_rows<8>(params, plan.grid, stream);
        case 16:
            return launch_linear_rows<16>(params, plan.grid, stream);
        default:
            return launch_linear_rows<32>(params, plan.grid, stream);
    }
}

size_t linear_shared_bytes(int row_class, const LinearMember& m) {
    switch (row_class) {
        case 2:
            return input_bytes<2>(m) + ring_bytes<2>(m);
        case 8:
            return input_bytes<8>(m) + ring_bytes<8>(m);
        case 16:
            return input_bytes<16>(m) + ring_bytes<16>(m);
        default:
            return input_bytes<32>(m) + ring_bytes<32>(m);
    }
}

}  // namespace exl3
