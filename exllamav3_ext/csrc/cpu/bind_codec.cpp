// Operators of the codec on the CPU: checks, output tensors, threads. The arithmetic is elsewhere.

#include "common.h"
#include "format.h"

namespace exl3 {
namespace {

// Rate of a trellis in half bits, from its last dimension 16 K.
int half_bits_of(const Tensor& trellis) {
    check_dim(trellis, 3, "trellis");
    check_dtype(trellis, ScalarType::Short, "trellis");
    const int64_t last = trellis.size(2);
    STD_TORCH_CHECK(last % 8 == 0 && last <= 128 && is_rate(int(last / 8)),
                    "trellis: last dimension is ", last, ", expected 16 K with a rate K of EXL3");
    return int(last / 8);
}

Tensor unpack(const Tensor& trellis_in) {
    const int half_bits = half_bits_of(trellis_in);
    const Tensor trellis = torch::stable::contiguous(trellis_in);
    const int64_t tiles = trellis.size(0) * trellis.size(1);
    Tensor states = empty({trellis.size(0), trellis.size(1), kTileWeights}, ScalarType::Short, trellis);
    const auto* in = static_cast<const uint32_t*>(trellis.const_data_ptr());
    auto* out = static_cast<uint16_t*>(states.mutable_data_ptr());
    torch::stable::parallel_for(0, tiles, 64, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile)
            for (int t = 0; t < kTileWeights; ++t)
                out[tile * kTileWeights + t] =
                    uint16_t(state_at(in + tile * tile_words(half_bits), half_bits, t));
    });
    return states;
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CPU, m) {
    m.impl("unpack", TORCH_BOX(&exl3::unpack));
}
