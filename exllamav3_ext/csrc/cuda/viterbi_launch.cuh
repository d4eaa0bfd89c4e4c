// Launch sequence of one rate; instantiated by viterbi_k*.cu so that rates compile in parallel.

#pragma once

#include "viterbi.h"
#include "viterbi_forward.cuh"
#include "viterbi_trace.cuh"

namespace exl3::search {

// Workspace: history of every block, then roots, order (count each) and n_order.
template <int K>
int64_t history_bytes(int64_t count) {
    using G = Layout<K>;
    return (count + G::kTiles - 1) / G::kTiles * G::kHistory * int64_t(sizeof(__half));
}

template <int K>
cudaError_t quantize_tiles_k(const Job& job, cudaStream_t stream) {
    using G = Layout<K>;
    auto* history = static_cast<__half*>(job.workspace);
    auto* roots = reinterpret_cast<int32_t*>(static_cast<char*>(job.workspace) +
                                             history_bytes<K>(job.count));
    int32_t *order = roots + job.count, *n_order = order + job.count;
    const ForwardArgs search{job.tiles, history, order, n_order, roots, job.count, job.codebook};
    const TraceArgs back{job.tiles, history,    order,      n_order,     roots,
                         job.values, job.states, job.count, job.codebook};
    const int blocks = (job.count + G::kTiles - 1) / G::kTiles;

    // Idempotent and cheap; a static flag would have to be kept per device.
    for (auto* kernel : {forward<K, false>, forward<K, true>}) {
        const cudaError_t status = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, G::kSharedBytes);
        if (status != cudaSuccess) return status;
    }
    forward<K, false><<<blocks, kThreads, G::kSharedBytes, stream>>>(search);
    trace<K, false><<<job.count, kTraceThreads, 0, stream>>>(back);
    collect_open<<<1, 1024, 0, stream>>>(roots, job.count, order, n_order);
    forward<K, true><<<blocks, kThreads, G::kSharedBytes, stream>>>(search);
    trace<K, true><<<job.count, kTraceThreads, 0, stream>>>(back);
    return cudaGetLastError();
}

}  // namespace exl3::search
