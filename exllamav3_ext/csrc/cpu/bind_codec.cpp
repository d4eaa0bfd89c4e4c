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
    torch::stable::parallel_for(0, tiles, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile)
            for (int t = 0; t < kTileWeights; ++t)
                out[tile * kTileWeights + t] =
                    uint16_t(state_at(in + tile * tile_words(half_bits), half_bits, t));
    });
    return states;
}

// Decodes 16 input rows by 128 output columns, and lays them out as a matrix.
void decode_strip(const PackedWeight& weight, DecodeTiles decode, int64_t row_tile, int64_t block,
                  float* values, float* matrix, int64_t matrix_stride) {
    constexpr int64_t tiles = kBlock / kTile;
    decode(weight.tile(row_tile, block * tiles), weight.tile_words, tiles, values);
    for (int64_t tile = 0; tile < tiles; ++tile)
        for (int row = 0; row < kTile; ++row)
            for (int col = 0; col < kTile; ++col)
                matrix[row * matrix_stride + tile * kTile + col] =
                    values[tile * kTileWeights + ring_position(row, col)];
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
        float values[kTileWeights], row_values[kTile];
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t a = tile / weight.n_tiles, b = tile % weight.n_tiles;
            decode_tiles(weight.tile(a, b), 0, 1, values);
            for (int row = 0; row < kTile; ++row) {
                for (int col = 0; col < kTile; ++col)
                    row_values[col] = values[ring_position(row, col)];
                kernels.float_to_half(row_values, kTile,
                                      out + (a * kTile + row) * n + b * kTile);
            }
        }
    });
    return inner;
}

Tensor reconstruct(const Tensor& trellis, const Tensor& suh, const Tensor& svh, int64_t codebook,
                   ScalarType dtype) {
    const PackedWeight weight(trellis);
    const Kernels& kernels = active_kernels();
    const DecodeTiles decode_tiles = decoder(kernels, weight.half_bits, codebook);
    const int64_t k = weight.k(), n = weight.n();
    STD_TORCH_CHECK(k % kBlock == 0 && n % kBlock == 0,
                    "reconstruct: k and n must be multiples of 128, got ", k, " and ", n);
    const std::vector<float> input_scale = scales(kernels, suh, k, "suh");
    const std::vector<float> output_scale = scales(kernels, svh, n, "svh");
    Tensor result = empty({k, n}, ScalarType::Float, trellis);
    auto* out = static_cast<float*>(result.mutable_data_ptr());

    // Blocks of 128 x 128 are independent: decode, rotate rows, rotate columns, scale.
    const int64_t n_blocks = n / kBlock, blocks = k / kBlock * n_blocks;
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> values(kBlock / kTile * kTileWeights);
        std::vector<float> square(kBlock * kBlock), turned(kBlock * kBlock);
        for (int64_t index = begin; index < end; ++index) {
            const int64_t a = index / n_blocks * kBlock, b = index % n_blocks * kBlock;
            for (int64_t tile = 0; tile < kBlock / kTile; ++tile)
                decode_strip(weight, decode_tiles, a / kTile + tile, b / kBlock, values.data(),
                             square.data() + tile * kTile * kBlock, kBlock);
            kernels.hadamard(square.data(), kBlock);
            transpose_block(square.data(), turned.data());
            kernels.hadamard(turned.data(), kBlock);
            transpose_block(turned.data(), square.data());
            for (int64_t row = 0; row < kBlock; ++row)
                for (int64_t col = 0; col < kBlock; ++col)
                    out[(a + row) * n + b + col] =
                        square[row * kBlock + col] * input_scale[a + row] * output_scale[b + col];
        }
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
