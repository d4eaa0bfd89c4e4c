// What the CPU bindings share: a packed weight as pointers and strides, scales as float32.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "common.h"
#include "cpu/kernels.h"
#include "format.h"

namespace exl3 {

// Rate of a trellis in half bits, from its last dimension 16 K.
inline int half_bits_of(const Tensor& trellis) {
    check_dim(trellis, 3, "trellis");
    check_dtype(trellis, ScalarType::Short, "trellis");
    const int64_t last = trellis.size(2);
    STD_TORCH_CHECK(last % 8 == 0 && last <= 128 && is_rate(int(last / 8)),
                    "trellis: last dimension is ", last, ", expected 16 K with a rate K of EXL3");
    return int(last / 8);
}

// Working memory on a cache line: a 64-byte load that crosses lines costs two.
class Scratch {
  public:
    explicit Scratch(int64_t floats)
        : data_(static_cast<float*>(std::aligned_alloc(64, size_t(floats + 15) / 16 * 64 + 64))) {
        STD_TORCH_CHECK(data_ != nullptr, "out of memory: ", floats, " floats of scratch");
    }
    float* data() const { return data_.get(); }

  private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> data_;
};

// A trellis whose tile rows may be apart, as in a slice of output columns.
struct PackedWeight {
    Tensor owner;
    int half_bits;
    int64_t k_tiles, n_tiles;
    int64_t tile_words, row_words;
    const uint32_t* words;

    explicit PackedWeight(const Tensor& trellis)
        : owner(trellis),
          half_bits(half_bits_of(trellis)),
          k_tiles(trellis.size(0)),
          n_tiles(trellis.size(1)),
          tile_words(exl3::tile_words(half_bits)) {
        const bool whole_tiles = trellis.stride(2) == 1 && trellis.stride(1) == 2 * tile_words &&
                                 trellis.stride(0) % 2 == 0 && trellis.stride(0) >= 0;
        const auto address = reinterpret_cast<uintptr_t>(trellis.const_data_ptr());
        if (!whole_tiles || address % alignof(uint32_t) != 0) {
            // contiguous() of an oddly placed but contiguous view would be itself: clone it.
            owner = torch::stable::contiguous(torch::stable::clone(trellis));
        }
        row_words = owner.stride(0) / 2;
        words = static_cast<const uint32_t*>(owner.const_data_ptr());
    }

    int64_t k() const { return k_tiles * kTile; }
    int64_t n() const { return n_tiles * kTile; }
    const uint32_t* tile(int64_t row, int64_t column) const {
        return words + row * row_words + column * tile_words;
    }
};

inline DecodeTiles decoder(const Kernels& kernels, int half_bits, int64_t codebook) {
    STD_TORCH_CHECK(codebook >= 0 && codebook <= 2, "codebook must be 0, 1 or 2, got ", codebook);
    const DecodeTiles decode = kernels.decode[half_bits][codebook];
    STD_TORCH_CHECK(decode != nullptr, "half-integer rates go with codebook 2 (mul1) only");
    return decode;
}

inline Tensor as_dtype(const Tensor& t, ScalarType dtype) {
    return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
}

// One scale for each of `size` channels, as float32.
inline std::vector<float> scales(const Kernels& kernels, const Tensor& t, int64_t size,
                                 const char* name) {
    check_dim(t, 1, name);
    check_size(t, 0, size, name);
    std::vector<float> result(static_cast<size_t>(size));
    if (t.scalar_type() == ScalarType::Half && t.is_contiguous()) {
        const auto* halves = static_cast<const uint16_t*>(t.const_data_ptr());
        kernels.half_to_float(halves, size, result.data());
    } else {
        const Tensor wide = torch::stable::contiguous(as_dtype(t, ScalarType::Float));
        const auto* values = static_cast<const float*>(wide.const_data_ptr());
        std::copy(values, values + size, result.begin());
    }
    return result;
}

}  // namespace exl3
