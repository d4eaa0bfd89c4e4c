// Aliases and checks for files that talk to torch. The only header that includes the stable ABI:
// it costs seconds per translation unit, so kernels live in files that do not include it.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace exl3 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// These checks are a backstop for memory safety. The Python wrappers validate first and raise the
// readable error; whoever calls torch.ops.exllamav3 directly gets these.

inline void check_dtype(const Tensor& t, ScalarType dtype, const char* name) {
    STD_TORCH_CHECK(t.scalar_type() == dtype, name, " must be ", torch::headeronly::toString(dtype),
                    ", got ", torch::headeronly::toString(t.scalar_type()));
}

inline void check_dim(const Tensor& t, int64_t dim, const char* name) {
    STD_TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, got ", t.dim());
}

inline void check_size(const Tensor& t, int64_t dim, int64_t size, const char* name) {
    STD_TORCH_CHECK(t.size(dim) == size, name, " must have size ", size, " in dimension ", dim,
                    ", got ", t.size(dim));
}

inline Tensor empty(std::vector<int64_t> shape, ScalarType dtype, const Tensor& like) {
    return torch::stable::empty(shape, dtype, std::nullopt, like.device());
}

}  // namespace exl3
