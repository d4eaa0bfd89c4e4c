// Arrival counters of the packed linear. They are zero between launches, because whoever arrives
// last resets its own; so they must outlive a launch and cannot come from a caching allocator.

#pragma once

#include <cuda_runtime.h>

namespace exl3 {

inline constexpr int kCounters = 1 << 18;

// kCounters zeroed integers of this device and stream, allocated at first use (also while a graph
// is being captured) and kept until the process ends: captured graphs hold the address.
cudaError_t arrival_counters(int device, cudaStream_t stream, int** counters);

}  // namespace exl3
