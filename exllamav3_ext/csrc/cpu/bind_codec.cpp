// pack, unpack, decode, reconstruct and hadamard on the CPU: checks, output tensors and threads.

#include "common.h"
#include "cpu/bind.h"
#include "cpu/kernels.h"
#include "format.h"

namespace exl3 {
namespace {

constexpr int64_t kGrain = 64;  // tiles or blocks for a thread to be worth waking

Tensor pack(const Tensor& states_in, double bits) {
    check_dtype(states_in, ScalarType::Short, "states");
    const int half_bits = int(2 * bits);
    STD_TORCH_CHECK(half_bits == 2 * bits && is_rate(half_bits), "pack: no rate of EXL3: ", bits);
    std::vector<int64_t> shape(states_in.sizes().begin(), states_in.sizes().end());
    STD_TORCH_CHECK(!shape.empty() && shape.back() == kTileWeights,
                    "states: the last dimension must be 256");
    shape.back() = tile_halves(half_bits);
    const Tensor states = torch::stable::contiguous(states_in);
    Tensor trellis = empty(shape, ScalarType::Short, states);
    const auto* in = static_cast<const uint16_t*>(states.const_data_ptr());
    auto* out = static_cast<uint32_t*>(trellis.mutable_data_ptr());
    const int64_t tiles = states.numel() / kTileWeights;
    torch::stable::parallel_for(0, tiles, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            uint32_t* words = out + tile * tile_words(half_bits);
            uint64_t pending = 0;
            int count = 0;
            for (int t = 0; t < kTileWeights; ++t) {
                const int width = symbol_bits(half_bits, t);
                pending = pending << width | (in[tile * kTileWeights + t] & ((1u << width) - 1));
                count += width;
                if (count >= 32) *words++ = uint32_t(pending >> (count -= 32));
            }
        }
    });
    return trellis;
}

Tensor unpack(const Tensor& trellis_in) {
    const int half_bits = half_bits_of(trellis_in);
    const Tensor trellis = torch::stable::contiguous(trellis_in);
    const int64_t tiles = trellis.size(0) * trellis.size(1);
    Tensor states =
        empty({trellis.size(0), trellis.size(1), kTileWeights}, ScalarType::Short, trellis);
    const auto* in = static_cast<const uint32_t*>(trellis.const_data_ptr());
    auto* out = static_cast<uint16_t*>(states.mutable_data_ptr());
    const UnpackTiles unpack_tiles = active_kernels().unpack[half_bits];
    torch::stable::parallel_for(0, tiles, kGrain, [&](int64_t begin, int64_t end) {
        unpack_tiles(in + begin * tile_words(half_bits), end - begin, out + begin * kTileWeights);
    });
    return states;
}

Tensor decode(const Tensor& trellis, int64_t codebook) {
    const PackedWeight weight(trellis);
    const Kernels& kernels = active_kernels();
    const DecodeTiles decode_tiles = decoder(kernels, weight.half_bits, codebook);
    const int64_t n = weight.n_tiles * kTile;
    Tensor inner = empty({weight.k_tiles * kTile, n}, ScalarType::Half, trellis);
    auto* out = static_cast<uint16_t*>(inner.mutable_data_ptr());
    const int64_t tiles = weight.k_tiles * weight.n_tiles;
    torch::stable::parallel_for(0, tiles, kGrain, [&](int64_t begin, int64_t end) {
        alignas(64) float values[kTileWeights], matrix[kTileWeights];
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t a = tile / weight.n_tiles, b = tile % weight.n_tiles;
            decode_tiles(weight.tile(a, b), 0, 1, values);
            kernels.tile_to_matrix(values, matrix, kTile);
            for (int row = 0; row < kTile; ++row)
                kernels.float_to_half(matrix + row * kTile, kTile,
                                      out + (a * kTile + row) * n + b * kTile);
        }
    });
    return inner;
}

Tensor reconstruct(const Tensor& trellis, const Tensor& suh, const Tensor& svh, int64_t codebook,
                   ScalarType dtype) {
    const PackedWeight weight(trellis);
    const Kernels& kernels = active_kernels();
    const int64_t k = weight.k(), n = weight.n();
    STD_TORCH_CHECK(k % kBlock == 0 && n % kBlock == 0,
                    "reconstruct: k and n must be multiples of 128, got ", k, " and ", n);
    const std::vector<float> input_scale = scales(kernels, suh, k, "suh");
    const std::vector<float> output_scale = scales(kernels, svh, n, "svh");
    Tensor result = empty({k, n}, ScalarType::Float, trellis);
    ReconstructJob job{};
    job.decode = decoder(kernels, weight.half_bits, codebook);
    job.trellis = weight.words;
    job.row_words = weight.row_words;
    job.tile_words = weight.tile_words;
    job.suh = input_scale.data();
    job.svh = output_scale.data();
    job.out = static_cast<float*>(result.mutable_data_ptr());
    job.n = n;
    const int64_t n_blocks = n / kBlock, blocks = k / kBlock * n_blocks;
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
        const Scratch scratch(kReconstructScratch);
        for (int64_t block = begin; block < end; ++block)
            kernels.reconstruct_block(job, block / n_blocks, block % n_blocks, scratch.data());
    });
    return as_dtype(result, dtype);
}

Tensor hadamard(const Tensor& x, const std::optional<Tensor>& pre_scale,
                const std::optional<Tensor>& post_scale) {
    STD_TORCH_CHECK(x.dim() >= 1, "hadamard: x must have at least one dimension");
    const int64_t k = x.size(x.dim() - 1);
    STD_TORCH_CHECK(k > 0 && k % kBlock == 0, "hadamard: the last dimension of x is ", k,
                    ", expected a multiple of 128");
    const Kernels& kernels = active_kernels();
    const std::vector<float> pre =
        pre_scale ? scales(kernels, *pre_scale, k, "pre_scale") : std::vector<float>();
    const std::vector<float> post =
        post_scale ? scales(kernels, *post_scale, k, "post_scale") : std::vector<float>();
    const Tensor input = torch::stable::contiguous(as_dtype(x, ScalarType::Float));
    Tensor result = torch::stable::empty(x.sizes(), ScalarType::Float, std::nullopt, x.device());
    const auto* in = static_cast<const float*>(input.const_data_ptr());
    auto* out = static_cast<float*>(result.mutable_data_ptr());
    torch::stable::parallel_for(0, x.numel() / k, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            float* y = out + row * k;
            for (int64_t i = 0; i < k; ++i) y[i] = in[row * k + i] * (pre.empty() ? 1.0f : pre[i]);
            kernels.hadamard(y, k / kBlock);
            if (!post.empty())
                for (int64_t i = 0; i < k; ++i) y[i] *= post[i];
        }
    });
    return as_dtype(result, x.scalar_type());
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CPU, m) {
    m.impl("pack", TORCH_BOX(&exl3::pack));
    m.impl("unpack", TORCH_BOX(&exl3::unpack));
    m.impl("decode", TORCH_BOX(&exl3::decode));
    m.impl("reconstruct", TORCH_BOX(&exl3::reconstruct));
    m.impl("hadamard", TORCH_BOX(&exl3::hadamard));
}
