// Operators of the codec, Hadamard and deinterleave on a CUDA device: checks and outputs.

#include "cuda/bind.h"
#include "cuda/codec.h"

namespace exl3 {
namespace {

WeightView view_of(const CudaWeight& weight, int64_t codebook) {
    return {weight.data,           weight.row_bytes, int(weight.k / kTile),
            int(weight.n / kTile), weight.half_bits, int(codebook)};
}

Tensor pack(const Tensor& states_in, double bits) {
    check_dtype(states_in, ScalarType::Short, "states");
    STD_TORCH_CHECK(states_in.dim() >= 1 && states_in.size(states_in.dim() - 1) == kTileWeights,
                    "pack: states must be (..., 256)");
    const int half_bits = int(2 * bits);
    STD_TORCH_CHECK(half_bits == 2 * bits && is_rate(half_bits), "pack: no such rate: ", bits);
    const CudaScope scope(states_in);
    const Tensor states = torch::stable::contiguous(states_in);
    std::vector<int64_t> shape(states.sizes().begin(), states.sizes().end());
    shape.back() = tile_halves(half_bits);
    Tensor trellis = empty(shape, ScalarType::Short, states);
    const int64_t tiles = states.numel() / kTileWeights;
    if (tiles > 0)
        EXL3_CUDA_CHECK(launch_pack(states.const_data_ptr(), trellis.mutable_data_ptr(), tiles,
                                    half_bits, scope.stream));
    return trellis;
}

Tensor unpack(const Tensor& trellis_in) {
    const CudaScope scope(trellis_in);
    const CudaWeight weight(trellis_in, kMul1);
    const Tensor trellis = for_vectors(weight.owner);
    Tensor states =
        empty({trellis.size(0), trellis.size(1), kTileWeights}, ScalarType::Short, trellis);
    const int64_t tiles = trellis.size(0) * trellis.size(1);
    if (tiles > 0)
        EXL3_CUDA_CHECK(launch_unpack(trellis.const_data_ptr(), states.mutable_data_ptr(), tiles,
                                      weight.half_bits, scope.stream));
    return states;
}

Tensor decode(const Tensor& trellis, int64_t codebook) {
    const CudaScope scope(trellis);
    const CudaWeight weight(trellis, codebook);
    Tensor out = empty({weight.k, weight.n}, ScalarType::Half, trellis);
    if (weight.k > 0 && weight.n > 0)
        EXL3_CUDA_CHECK(
            launch_decode(view_of(weight, codebook), out.mutable_data_ptr(), scope.stream));
    return out;
}

// Scales of one side of a weight, ready for vector loads.
Tensor channel_scales(const Tensor& scales, int64_t channels, const Tensor& as, const char* name) {
    check_dtype(scales, ScalarType::Half, name);
    check_dim(scales, 1, name);
    check_size(scales, 0, channels, name);
    check_same_device(scales, as, name);
    return for_vectors(scales);
}

Tensor reconstruct(const Tensor& trellis, const Tensor& suh_in, const Tensor& svh_in,
                   int64_t codebook, ScalarType dtype) {
    const CudaScope scope(trellis);
    const CudaWeight weight(trellis, codebook);
    weight.check_blocks("reconstruct");
    const Tensor suh = channel_scales(suh_in, weight.k, trellis, "suh");
    const Tensor svh = channel_scales(svh_in, weight.n, trellis, "svh");
    Tensor out = empty({weight.k, weight.n}, dtype, trellis);
    EXL3_CUDA_CHECK(launch_reconstruct(view_of(weight, codebook), suh.const_data_ptr(),
                                       svh.const_data_ptr(), out.mutable_data_ptr(),
                                       float_type(dtype, "dtype"), scope.stream));
    return out;
}

Tensor reconstruct_columns(const Tensor& trellis, const Tensor& suh_in, const Tensor& svh_in,
                           int64_t codebook) {
    const CudaScope scope(trellis);
    const CudaWeight weight(trellis, codebook);
    weight.check_blocks("reconstruct_columns");
    const Tensor suh = channel_scales(suh_in, weight.k, trellis, "suh");
    const Tensor svh = channel_scales(svh_in, weight.n, trellis, "svh");
    Tensor out = empty({weight.k, weight.n}, ScalarType::Half, trellis);
    EXL3_CUDA_CHECK(launch_reconstruct_columns(view_of(weight, codebook), suh.const_data_ptr(),
                                               svh.const_data_ptr(), out.mutable_data_ptr(),
                                               scope.stream));
    return out;
}

Tensor rotate_input(const Tensor& x_in, const Tensor& suh_in) {
    STD_TORCH_CHECK(x_in.dim() >= 1 && x_in.size(x_in.dim() - 1) > 0 &&
                        x_in.size(x_in.dim() - 1) % kBlock == 0,
                    "rotate_input: the last dimension of x must be a positive multiple of 128");
    const CudaScope scope(x_in);
    const Tensor x = for_vectors(x_in);
    const int64_t k = x.size(x.dim() - 1);
    const Tensor suh = channel_scales(suh_in, k, x, "suh");
    Tensor out = empty(std::vector<int64_t>(x.sizes().begin(), x.sizes().end()), ScalarType::Half,
                       x);
    if (x.numel() > 0)
        EXL3_CUDA_CHECK(launch_rotate_input(x.const_data_ptr(), suh.const_data_ptr(),
                                            out.mutable_data_ptr(), x.numel() / k, int(k),
                                            float_type(x.scalar_type(), "x"), scope.stream));
    return out;
}

Tensor hadamard(const Tensor& x_in, const std::optional<Tensor>& pre_in,
                const std::optional<Tensor>& post_in) {
    STD_TORCH_CHECK(x_in.dim() >= 1 && x_in.size(x_in.dim() - 1) % kBlock == 0,
                    "hadamard: the last dimension of x must be a multiple of 128");
    const CudaScope scope(x_in);
    const Tensor x = for_vectors(x_in);
    const int64_t k = x.size(x.dim() - 1);
    auto scale = [&](const std::optional<Tensor>& t, const char* name) -> std::optional<Tensor> {
        if (!t) return std::nullopt;
        check_dim(*t, 1, name);
        check_size(*t, 0, k, name);
        check_same_device(*t, x, name);
        return for_vectors(*t);
    };
    const std::optional<Tensor> pre = scale(pre_in, "pre_scale"),
                                post = scale(post_in, "post_scale");
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    Tensor out = empty(shape, x.scalar_type(), x);
    if (x.numel() > 0)
        EXL3_CUDA_CHECK(launch_hadamard(
            x.const_data_ptr(), pre ? pre->const_data_ptr() : nullptr,
            post ? post->const_data_ptr() : nullptr, out.mutable_data_ptr(), x.numel() / k,
            int(k / kBlock), float_type(x.scalar_type(), "x"),
            pre ? float_type(pre->scalar_type(), "pre_scale") : Float::kHalf,
            post ? float_type(post->scalar_type(), "post_scale") : Float::kHalf, scope.stream));
    return out;
}

std::tuple<Tensor, Tensor> deinterleave_qg(const Tensor& qg, int64_t head_dim) {
    check_dim(qg, 3, "qg");
    check_dtype(qg, ScalarType::Half, "qg");
    STD_TORCH_CHECK(head_dim > 0 && qg.size(2) % (2 * head_dim) == 0,
                    "deinterleave_qg: the last dimension of qg must be a multiple of 2 * head_dim");
    STD_TORCH_CHECK(qg.is_contiguous(), "deinterleave_qg: qg must be contiguous");
    STD_TORCH_CHECK(head_dim % 8 == 0, "deinterleave_qg: head_dim must be a multiple of 8, got ",
                    head_dim);
    STD_TORCH_CHECK(is_aligned16(qg), "deinterleave_qg: qg must be aligned to 16 bytes");
    const CudaScope scope(qg);
    const int64_t heads = qg.size(2) / (2 * head_dim);
    Tensor q = empty({qg.size(0), qg.size(1), heads, head_dim}, ScalarType::Half, qg);
    Tensor gate = empty({qg.size(0), qg.size(1), heads * head_dim}, ScalarType::Half, qg);
    if (qg.numel() > 0)
        EXL3_CUDA_CHECK(
            launch_deinterleave(qg.const_data_ptr(), q.mutable_data_ptr(), gate.mutable_data_ptr(),
                                qg.size(0) * qg.size(1) * heads, int(head_dim), scope.stream));
    return {q, gate};
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CUDA, m) {
    m.impl("pack", TORCH_BOX(&exl3::pack));
    m.impl("unpack", TORCH_BOX(&exl3::unpack));
    m.impl("decode", TORCH_BOX(&exl3::decode));
    m.impl("reconstruct", TORCH_BOX(&exl3::reconstruct));
    m.impl("reconstruct_columns", TORCH_BOX(&exl3::reconstruct_columns));
    m.impl("rotate_input", TORCH_BOX(&exl3::rotate_input));
    m.impl("hadamard", TORCH_BOX(&exl3::hadamard));
    m.impl("deinterleave_qg", TORCH_BOX(&exl3::deinterleave_qg));
}
