// The packed linear on the CPU: checks, the input transform, threads over blocks of 128 columns.

#include <algorithm>

#include "common.h"
#include "cpu/bind.h"
#include "cpu/kernels.h"
#include "format.h"

namespace exl3 {
namespace {

// Rows of x times suh, rotated, and arranged for linear_block.
void transform_input(const Kernels& kernels, const float* x, int64_t rows, int64_t k,
                     const std::vector<float>& suh, float* arranged) {
    torch::stable::parallel_for(0, rows, 4, [&](int64_t begin, int64_t end) {
        const Scratch row_values(k);
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t i = 0; i < k; ++i) row_values.data()[i] = x[row * k + i] * suh[i];
            kernels.hadamard(row_values.data(), k / kBlock);
            kernels.arrange_x(row_values.data(), k, row, rows, arranged);
        }
    });
}

Tensor linear(const Tensor& x, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
              const std::optional<Tensor>& bias, int64_t codebook, ScalarType out_dtype) {
    const PackedWeight weight(trellis);
    const int64_t k = weight.k(), n = weight.n();
    STD_TORCH_CHECK(k % kBlock == 0 && n % kBlock == 0 && k > 0,
                    "linear: k and n must be multiples of 128, got ", k, " and ", n);
    STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == k,
                    "linear: the last dimension of x must be ", k);
    const Kernels& kernels = active_kernels();
    const std::vector<float> output_scale = scales(kernels, svh, n, "svh");
    const std::vector<float> bias_values =
        bias ? scales(kernels, *bias, n, "bias") : std::vector<float>();

    const Tensor input = torch::stable::contiguous(as_dtype(x, ScalarType::Float));
    const int64_t rows = input.numel() / k;
    const auto* x_values = static_cast<const float*>(input.const_data_ptr());
    const std::vector<float> input_scale = scales(kernels, suh, k, "suh");

    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = n;
    Tensor result = empty(shape, ScalarType::Float, x);
    LinearJob job{};
    job.decode = decoder(kernels, weight.half_bits, codebook);
    job.trellis = weight.words;
    job.row_words = weight.row_words;
    job.tile_words = weight.tile_words;
    job.k_tiles = weight.k_tiles;
    job.svh = output_scale.data();
    job.bias = bias ? bias_values.data() : nullptr;
    job.n = n;
    const Scratch arranged(kernels.arranged_size(k, std::min(kernels.linear_rows, rows)));
    for (int64_t row = 0; row < rows; row += kernels.linear_rows) {
        job.rows = std::min(kernels.linear_rows, rows - row);
        transform_input(kernels, x_values + row * k, job.rows, k, input_scale,
                        arranged.data());
        job.x = arranged.data();
        job.y = static_cast<float*>(result.mutable_data_ptr()) + row * n;
        torch::stable::parallel_for(0, n / kBlock, 1, [&](int64_t begin, int64_t end) {
            const Scratch scratch(kernels.linear_scratch(job.rows));
            for (int64_t block = begin; block < end; ++block)
                kernels.linear_block(job, block, scratch.data());
        });
    }
    return as_dtype(result, out_dtype);
}

std::vector<Tensor> linear_group(const Tensor& x, const std::vector<Tensor>& trellis,
                                 const std::vector<Tensor>& suh, const std::vector<Tensor>& svh,
                                 const std::vector<int64_t>& codebooks, ScalarType out_dtype) {
    STD_TORCH_CHECK(trellis.size() == suh.size() && suh.size() == svh.size() &&
                        svh.size() == codebooks.size(),
                    "linear_group: the lists must have the same length");
    std::vector<Tensor> results;
    for (size_t i = 0; i < trellis.size(); ++i)
        results.push_back(
            linear(x, trellis[i], suh[i], svh[i], std::nullopt, codebooks[i], out_dtype));
    return results;
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CPU, m) {
    m.impl("linear", TORCH_BOX(&exl3::linear));
    m.impl("linear_group", TORCH_BOX(&exl3::linear_group));
}
