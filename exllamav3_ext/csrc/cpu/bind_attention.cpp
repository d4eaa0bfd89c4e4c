// Operators of gated attention and of the gated delta net on the CPU.

#include <cmath>
#include <cstring>

#include "common.h"
#include "cpu/bind.h"
#include "cpu/kernels.h"

namespace exl3 {
namespace {

std::tuple<Tensor, Tensor> deinterleave_qg(const Tensor& qg, int64_t head_dim) {
    check_dim(qg, 3, "qg");
    check_dtype(qg, ScalarType::Half, "qg");
    STD_TORCH_CHECK(qg.is_contiguous(), "deinterleave_qg: qg must be contiguous");
    const int64_t width = qg.size(2);
    STD_TORCH_CHECK(head_dim > 0 && width % (2 * head_dim) == 0,
                    "deinterleave_qg: the last dimension of qg is ", width,
                    ", expected a multiple of 2 * head_dim = ", 2 * head_dim);
    const int64_t heads = width / (2 * head_dim), size = 2 * head_dim;  // float16: 2 bytes a lane
    Tensor q = empty({qg.size(0), qg.size(1), heads, head_dim}, ScalarType::Half, qg);
    Tensor gate = empty({qg.size(0), qg.size(1), heads * head_dim}, ScalarType::Half, qg);
    const auto* in = static_cast<const char*>(qg.const_data_ptr());
    auto* q_out = static_cast<char*>(q.mutable_data_ptr());
    auto* gate_out = static_cast<char*>(gate.mutable_data_ptr());
    const int64_t count = qg.size(0) * qg.size(1) * heads;
    torch::stable::parallel_for(0, count, 1024, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            std::memcpy(q_out + i * size, in + 2 * i * size, size);
            std::memcpy(gate_out + i * size, in + (2 * i + 1) * size, size);
        }
    });
    return {q, gate};
}

Tensor float_contiguous(const Tensor& t) {
    return torch::stable::contiguous(as_dtype(t, ScalarType::Float));
}

std::tuple<Tensor, Tensor> gated_delta_rule(const Tensor& q_in, const Tensor& k_in,
                                            const Tensor& v_in, const Tensor& g_in,
                                            const Tensor& beta_in, const Tensor& state_in) {
    for (const Tensor* t : {&q_in, &k_in, &v_in, &state_in}) check_dim(*t, 4, "q, k, v and state");
    for (const Tensor* t : {&g_in, &beta_in}) check_dim(*t, 3, "g and beta");
    const int64_t batch = q_in.size(0), tokens = q_in.size(1), k_heads = q_in.size(2);
    const int64_t dk = q_in.size(3), heads = v_in.size(2), dv = v_in.size(3);
    const int64_t expected[6][4] = {{batch, tokens, k_heads, dk}, {batch, tokens, k_heads, dk},
                                    {batch, tokens, heads, dv},   {batch, tokens, heads, -1},
                                    {batch, tokens, heads, -1},   {batch, heads, dk, dv}};
    const Tensor* inputs[6] = {&q_in, &k_in, &v_in, &g_in, &beta_in, &state_in};
    for (int i = 0; i < 6; ++i)
        for (int64_t dim = 0; dim < inputs[i]->dim(); ++dim)
            check_size(*inputs[i], dim, expected[i][dim], "an input of gated_delta_rule");
    STD_TORCH_CHECK(k_heads > 0 && heads % k_heads == 0, "gated_delta_rule: v heads must be a "
                    "multiple of k heads, got ", heads, " and ", k_heads);

    const Tensor q = float_contiguous(q_in), k = float_contiguous(k_in), v = float_contiguous(v_in);
    const Tensor g = float_contiguous(g_in), beta = float_contiguous(beta_in);
    Tensor state = torch::stable::clone(float_contiguous(state_in));
    Tensor out = empty({batch, tokens, heads, dv}, ScalarType::Float, v_in);
    const auto data = [](const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); };
    const float *q_data = data(q), *k_data = data(k), *v_data = data(v);
    const float *g_data = data(g), *beta_data = data(beta);
    auto* state_data = static_cast<float*>(state.mutable_data_ptr());
    auto* out_data = static_cast<float*>(out.mutable_data_ptr());
    const Kernels& kernels = active_kernels();
    torch::stable::parallel_for(0, batch * heads, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> delta(static_cast<size_t>(dv));
        for (int64_t index = begin; index < end; ++index) {
            const int64_t b = index / heads, head = index % heads;
            const int64_t k_head = head / (heads / k_heads);
            for (int64_t t = 0; t < tokens; ++t) {
                const int64_t token = b * tokens + t, at = token * heads + head;
                const int64_t k_at = (token * k_heads + k_head) * dk;
                kernels.delta_step(q_data + k_at, k_data + k_at, v_data + at * dv,
                                   std::exp(g_data[at]), beta_data[at], dk, dv,
                                   state_data + index * dk * dv, delta.data(), out_data + at * dv);
            }
        }
    });
    return {as_dtype(out, v_in.scalar_type()), state};
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CPU, m) {
    m.impl("deinterleave_qg", TORCH_BOX(&exl3::deinterleave_qg));
    m.impl("gated_delta_rule", TORCH_BOX(&exl3::gated_delta_rule));
}
