// Chooses the kernel of a launch. The kernels themselves are compiled in instances/*.cu.

#include <algorithm>

#include "cuda/linear_sizes.cuh"

namespace exl3 {

template <int Rows, int Rate, bool IsMul1>
cudaError_t launch_linear_kernel(const LinearParams&, int grid, LinearBytes, cudaStream_t);

namespace {

// Two thread blocks on a multiprocessor of 228 KB leave this much to each.
constexpr size_t kHalfOfShared = 111 * 1024;

LinearBytes layout(size_t input, size_t ring, size_t inbox) {
    const bool own = inbox > 0 && input + ring + inbox <= kHalfOfShared;
    const size_t ring_at = own ? input : std::max(input, inbox);
    return {static_cast<int>(ring_at), own ? static_cast<int>(input + ring) : 0,
            static_cast<int>(ring_at + ring + (own ? inbox : 0)), own};
}

}  // namespace

template <int Rows>
cudaError_t launch_linear_rows(const LinearParams& p, int grid, cudaStream_t stream) {
    size_t input = 0, ring = 0, inbox = 0;
    for (int i = 0; i < p.members; ++i) {
        input = std::max(input, input_bytes<Rows>(p.member[i]));
        ring = std::max(ring, ring_bytes<Rows>(p.member[i]));
        inbox = std::max(inbox, inbox_bytes<Rows>(p.member[i], p.cluster));
    }
    const LinearBytes bytes = layout(input, ring, inbox);
    if (p.members > 1) return launch_linear_kernel<Rows, 0, false>(p, grid, bytes, stream);
    switch (p.member[0].half_bits * 2 + (p.member[0].codebook == kMul1)) {
#define EXL3_MUL1(h) \
    case h * 2 + 1:  \
        return launch_linear_kernel<Rows, h, true>(p, grid, bytes, stream);
#define EXL3_BOTH(h)                                                         \
    case h * 2:                                                              \
        return launch_linear_kernel<Rows, h, false>(p, grid, bytes, stream); \
        EXL3_MUL1(h)
        EXL3_FOR_RATES(EXL3_BOTH)
        EXL3_FOR_HALF_RATES(EXL3_MUL1)
#undef EXL3_BOTH
#undef EXL3_MUL1
    }
    return cudaErrorInvalidValue;
}

bool has_clusters(int device) {
    int major = 0, supported = 0;
    // Compute capability 12 has other limits, and nobody has tried it.
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           (major == 9 || major == 10) &&
           cudaDeviceGetAttribute(&supported, cudaDevAttrClusterLaunch, device) == cudaSuccess &&
           supported != 0;
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

template <int Rows>
size_t shared_bytes(const LinearMember& m, int cluster) {
    return layout(input_bytes<Rows>(m), ring_bytes<Rows>(m), inbox_bytes<Rows>(m, cluster)).all;
}

size_t linear_shared_bytes(int row_class, const LinearMember& m, int cluster) {
    switch (row_class) {
        case 2:
            return shared_bytes<2>(m, cluster);
        case 8:
            return shared_bytes<8>(m, cluster);
        case 16:
            return shared_bytes<16>(m, cluster);
        default:
            return shared_bytes<32>(m, cluster);
    }
}

}  // namespace exl3
