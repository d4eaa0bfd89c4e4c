// Shared memory of one thread block of the packed linear.

#pragma once

#include <algorithm>

#include "cuda/linear_kernel.cuh"

namespace exl3 {

// The ring, and after the last quad the sums in its place.
template <int Rows>
size_t ring_bytes(const LinearMember& m) {
    using S = Shape<Rows>;
    const size_t k_groups = kLinearWarps >> m.across_bits;
    const size_t rows = 4 * k_groups * S::kSums * ((16 * S::kTiles << m.across_bits) + 4);
    const size_t fragments = kLinearWarps * S::kTiles * S::kGroups * 32 * sizeof(float4);
    const size_t sums = std::max(rows, k_groups > 1 ? fragments : 0);
    switch (m.half_bits) {
#define EXL3_CASE(h)     \
    case h:              \
        return std::max( \
            sums, size_t{kLinearWarps} * S::template depth<h>() * Stage<h, S::kTiles>::kBytes);
        EXL3_FOR_RATES(EXL3_CASE)
        EXL3_FOR_HALF_RATES(EXL3_CASE)
#undef EXL3_CASE
    }
    return 0;
}

template <int Rows>
size_t input_bytes(const LinearMember& m) {
    using S = Shape<Rows>;
    const size_t columns = size_t((m.slice_quads + 1) / 2) * kBlock * S::kColumns;
    switch (m.half_bits) {
#define EXL3_CASE(h) \
    case h:          \
        return columns * S::template input_bytes<h>();
        EXL3_FOR_RATES(EXL3_CASE)
        EXL3_FOR_HALF_RATES(EXL3_CASE)
#undef EXL3_CASE
    }
    return 0;
}

// Where a cluster's blocks put the sums that this one adds.
template <int Rows>
size_t inbox_bytes(const LinearMember& m, int cluster) {
    if (cluster == 1) return 0;
    const size_t slots = (items_of_job<Rows>(m) + cluster - 1) / cluster;
    return slots * cluster * kItemSize<Rows> * sizeof(float4);
}

}  // namespace exl3
