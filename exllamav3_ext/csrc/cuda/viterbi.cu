// Rate dispatch of the CUDA tile quantizer.

#include "viterbi.h"
#include "viterbi_layout.cuh"

namespace exl3::search {
namespace {

template <int K>
int64_t bytes(int64_t count) {
    using G = Layout<K>;
    const int64_t blocks = (count + G::kTiles - 1) / G::kTiles;
    return blocks * G::kHistory * int64_t(sizeof(__half)) + (2 * count + 1) * int64_t(sizeof(int));
}

}  // namespace

#define EXL3_FOR_BITS(bits, expression)       \
    switch (bits) {                           \
        case 1: { constexpr int K = 1; expression; } break; \
        case 2: { constexpr int K = 2; expression; } break; \
        case 3: { constexpr int K = 3; expression; } break; \
        case 4: { constexpr int K = 4; expression; } break; \
        case 5: { constexpr int K = 5; expression; } break; \
        case 6: { constexpr int K = 6; expression; } break; \
        case 7: { constexpr int K = 7; expression; } break; \
        case 8: { constexpr int K = 8; expression; } break; \
        default: break;                       \
    }

int64_t workspace_bytes(int bits, int64_t count) {
    EXL3_FOR_BITS(bits, return bytes<K>(count));
    return 0;
}

int64_t tiles_that_fit(int bits, int64_t limit, int sms) {
    const int64_t wave = int64_t(sms) * (bits == 1 ? 1 : 2);
    const int64_t waves = limit / workspace_bytes(bits, wave);
    return waves > 0 ? waves * wave : wave;
}

cudaError_t quantize_tiles(int bits, const Job& job, cudaStream_t stream) {
    EXL3_FOR_BITS(bits, return quantize_tiles_k<K>(job, stream));
    return cudaErrorInvalidValue;
}

}  // namespace exl3::search
