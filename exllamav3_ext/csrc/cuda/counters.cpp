#include "cuda/counters.h"

#include <map>
#include <mutex>
#include <utility>

namespace exl3 {
namespace {

// Allocates and zeroes without touching whatever stream may be capturing.
cudaError_t allocate(int** counters) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t status = cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != cudaSuccess) return status;
    cudaStream_t own = nullptr;
    status = cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
    if (status == cudaSuccess) status = cudaMalloc(counters, kCounters * sizeof(int));
    if (status == cudaSuccess) status = cudaMemsetAsync(*counters, 0, kCounters * sizeof(int), own);
    if (status == cudaSuccess) status = cudaStreamSynchronize(own);
    if (own) cudaStreamDestroy(own);
    const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
    return status == cudaSuccess ? restored : status;
}

}  // namespace

cudaError_t arrival_counters(int device, cudaStream_t stream, int** counters) {
    static std::mutex mutex;
    static std::map<std::pair<int, cudaStream_t>, int*> known;
    const std::lock_guard lock(mutex);
    int*& entry = known[{device, stream}];
    if (entry == nullptr) {
        if (const cudaError_t status = allocate(&entry); status != cudaSuccess) {
            entry = nullptr;
            return status;
        }
    }
    *counters = entry;
    return cudaSuccess;
}

}  // namespace exl3
