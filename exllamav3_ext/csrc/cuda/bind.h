// What the CUDA bindings share: a packed weight as a pointer and strides, types, checks.

#pragma once

#include <cstdint>

#include "common.h"
#include "cuda/linear_params.h"
#include "cuda/stream.h"
#include "format.h"

namespace exl3 {

inline Float float_type(ScalarType dtype, const char* name) {
    STD_TORCH_CHECK(
        dtype == ScalarType::Half || dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
        name, " must be float16, float32 or bfloat16, got ", torch::headeronly::toString(dtype));
    return dtype == ScalarType::Half    ? Float::kHalf
           : dtype == ScalarType::Float ? Float::kFloat
                                        : Float::kBFloat16;
}

inline bool is_aligned16(const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Contiguous and 16-byte aligned, as the vector loads of the kernels want it.
inline Tensor for_vectors(const Tensor& t) {
    const Tensor dense = torch::stable::contiguous(t);
    return is_aligned16(dense) ? dense : torch::stable::clone(dense);
}

inline void check_same_device(const Tensor& t, const Tensor& as, const char* name) {
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == as.get_device_index(), name,
                    " must be on the device of the first argument");
}

// A trellis whose tile rows may be apart, as in a slice of output columns.
struct CudaWeight {
    Tensor owner;
    int half_bits;
    int64_t k, n;
    int64_t row_bytes;
    const void* data;

    CudaWeight(const Tensor& trellis, int64_t codebook) : owner(trellis) {
        check_dim(trellis, 3, "trellis");
        check_dtype(trellis, ScalarType::Short, "trellis");
        const int64_t last = trellis.size(2);
        STD_TORCH_CHECK(last % 8 == 0 && last <= 128 && is_rate(int(last / 8)),
                        "trellis: last dimension is ", last,
                        ", expected 16 K with a rate K of EXL3");
        STD_TORCH_CHECK(codebook >= 0 && codebook <= 2, "codebook must be 0, 1 or 2, got ",
                        codebook);
        half_bits = int(last / 8);
        STD_TORCH_CHECK(half_bits % 2 == 0 || codebook == kMul1,
                        "half-integer rates go with codebook 2 (mul1) only");
        const bool whole_tiles =
            trellis.stride(2) == 1 && trellis.stride(1) == last && trellis.stride(0) % 8 == 0;
        if (!whole_tiles || !is_aligned16(trellis)) owner = for_vectors(trellis);
        k = trellis.size(0) * kTile;
        n = trellis.size(1) * kTile;
        row_bytes = owner.stride(0) * 2;
        data = owner.const_data_ptr();
    }

    void check_blocks(const char* op) const {
        STD_TORCH_CHECK(k > 0 && n > 0 && k % kBlock == 0 && n % kBlock == 0, op,
                        ": k and n must be positive multiples of 128, got ", k, " and ", n);
    }
};

}  // namespace exl3
