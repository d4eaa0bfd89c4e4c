// Operators between the linears on a CUDA device: checks and outputs.

#include "../common.h"
#include "run_path.h"
#include "stream.h"

namespace exl3 {
namespace {

run::Type type_of(ScalarType dtype, const char* name) {
    STD_TORCH_CHECK(
        dtype == ScalarType::Half || dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
        name, " must be float16, float32 or bfloat16, got ", torch::headeronly::toString(dtype));
    return dtype == ScalarType::Half    ? run::Type::kHalf
           : dtype == ScalarType::Float ? run::Type::kFloat
                                        : run::Type::kBFloat16;
}

// Contiguous arguments, kept alive until the launch has been queued.
class Arguments {
  public:
    explicit Arguments(const Tensor& like) : like_(like) {}

    run::Array array(const Tensor& t, int64_t count, const char* name) {
        return {data(t, count, name), type_of(t.scalar_type(), name)};
    }
    const float* floats(const Tensor& t, int64_t count, const char* name) {
        check_dtype(t, ScalarType::Float, name);
        return static_cast<const float*>(data(t, count, name));
    }
    const int64_t* longs(const Tensor& t, int64_t count, const char* name) {
        check_dtype(t, ScalarType::Long, name);
        return static_cast<const int64_t*>(data(t, count, name));
    }
    const bool* bools(const Tensor& t, int64_t count, const char* name) {
        check_dtype(t, ScalarType::Bool, name);
        return static_cast<const bool*>(data(t, count, name));
    }
    static run::MutableArray result(Tensor& t) {
        return {t.mutable_data_ptr(), type_of(t.scalar_type(), "output")};
    }

  private:
    const void* data(const Tensor& t, int64_t count, const char* name) {
        STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like_.get_device_index(), name,
                        " must be on the device of the first argument");
        STD_TORCH_CHECK(t.numel() == count, name, " must have ", count, " elements, got ",
                        t.numel());
        kept_.push_back(torch::stable::contiguous(t));
        return kept_.back().const_data_ptr();
    }

    const Tensor like_;
    std::vector<Tensor> kept_;
};

int checked_int(int64_t value, const char* name) {
    STD_TORCH_CHECK(value >= 0 && value < (int64_t(1) << 31), name, " is out of range: ", value);
    return int(value);
}

// Batch and tokens are the z and y of a grid.
void check_grid(int64_t batch, int64_t tokens) {
    STD_TORCH_CHECK(batch < 65536 && tokens < 65536, "at most 65535 rows of 65535 tokens, got ",
                    batch, " of ", tokens);
}

std::vector<int64_t> shape_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

Tensor rms_norm(const Tensor& x, const Tensor& scale, double eps, const std::optional<Tensor>& gate,
                ScalarType out_dtype) {
    check_dim(scale, 1, "scale");
    const int64_t size = scale.size(0);
    STD_TORCH_CHECK(x.dim() >= 1 && size > 0 && x.size(x.dim() - 1) == size,
                    "rms_norm: the last dimension of x must be that of scale, ", size);
    const CudaScope scope(x);
    Arguments args(x);
    Tensor out = empty(shape_of(x), out_dtype, x);
    run::NormJob job{};
    job.rows = x.numel() / size;
    job.size = checked_int(size, "size");
    job.eps = float(eps);
    job.x = args.array(x, x.numel(), "x");
    job.scale = args.floats(scale, size, "scale");
    if (gate) job.gate = args.array(*gate, x.numel(), "gate");
    job.out = Arguments::result(out);
    checked_int(job.rows, "rows");
    if (job.rows > 0) EXL3_CUDA_CHECK(run::rms_norm(job, scope.stream));
    return out;
}

Tensor norm_rotate(const Tensor& x_in, const std::optional<Tensor>& scale, double eps,
                   const Tensor& cos, const Tensor& sin) {
    check_dim(x_in, 4, "x");
    check_dim(cos, 4, "cos");
    const CudaScope scope(x_in);
    const Tensor x = x_in.stride(3) == 1 ? x_in : torch::stable::contiguous(x_in);
    const int64_t batch = x.size(0), tokens = x.size(1), half = cos.size(3);
    check_grid(batch, tokens);
    STD_TORCH_CHECK(2 * half <= x.size(3) && x.size(3) <= 8192, "norm_rotate: ", 2 * half,
                    " rotary lanes of ", x.size(3));
    Arguments args(x);
    Tensor out = empty(shape_of(x), x.scalar_type(), x);
    run::RotateJob job{};
    job.x = {x.const_data_ptr(), type_of(x.scalar_type(), "x")};
    job.batch_stride = x.stride(0);
    job.token_stride = x.stride(1);
    job.head_stride = x.stride(2);
    if (scale) job.scale = args.floats(*scale, x.size(3), "scale");
    job.cos = args.floats(cos, batch * tokens * half, "cos");
    job.sin = args.floats(sin, batch * tokens * half, "sin");
    job.out = Arguments::result(out);
    job.batch = int(batch);
    job.tokens = int(tokens);
    job.heads = checked_int(x.size(2), "heads");
    job.head_dim = int(x.size(3));
    job.half = int(half);
    job.eps = float(eps);
    if (x.numel() > 0) EXL3_CUDA_CHECK(run::norm_rotate(job, scope.stream));
    return out;
}

Tensor gate_mul(const Tensor& gate, const Tensor& x, bool silu) {
    const CudaScope scope(x);
    Arguments args(x);
    Tensor out = empty(shape_of(x), x.scalar_type(), x);
    run::GateJob job{};
    job.gate = args.array(gate, x.numel(), "gate");
    job.x = args.array(x, x.numel(), "x");
    job.out = Arguments::result(out);
    job.count = x.numel();
    job.silu = silu;
    if (job.count > 0) EXL3_CUDA_CHECK(run::gate_mul(job, scope.stream));
    return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> delta_inputs(
    const Tensor& qkv, const Tensor& past, const Tensor& weight, const Tensor& a, const Tensor& b,
    const Tensor& decay_log, const Tensor& time_bias, const std::optional<Tensor>& lengths,
    int64_t key_heads, int64_t key_dim) {
    check_dim(qkv, 3, "qkv");
    check_dim(past, 3, "past");
    check_dim(decay_log, 1, "decay_log");
    const int64_t batch = qkv.size(0), tokens = qkv.size(1), channels = qkv.size(2);
    const int64_t value_heads = decay_log.size(0), taps = past.size(2) + 1;
    const int64_t value_width = channels - 2 * key_heads * key_dim;
    STD_TORCH_CHECK(key_heads > 0 && key_dim > 0 && value_heads > 0 && value_width > 0 &&
                        value_width % value_heads == 0,
                    "delta_inputs: ", channels, " channels are not q, k and v of these heads");
    const int64_t value_dim = value_width / value_heads;
    check_grid(batch, tokens);
    STD_TORCH_CHECK(tokens > 0 && key_dim <= 8192 && value_dim <= 8192 && channels < (1 << 24),
                    "delta_inputs: no tokens, or heads too large");
    const CudaScope scope(qkv);
    Arguments args(qkv);
    auto floats = [&](std::vector<int64_t> shape) { return empty(shape, ScalarType::Float, qkv); };
    Tensor q = floats({batch, tokens, key_heads, key_dim}),
           k = floats({batch, tokens, key_heads, key_dim});
    Tensor v = floats({batch, tokens, value_heads, value_dim});
    Tensor g = floats({batch, tokens, value_heads}), beta = floats({batch, tokens, value_heads});
    Tensor next = floats({batch, channels, taps - 1});
    const int64_t gates = batch * tokens * value_heads;
    run::DeltaInputsJob job{};
    job.qkv = args.array(qkv, qkv.numel(), "qkv");
    job.a = args.array(a, gates, "a");
    job.b = args.array(b, gates, "b");
    job.past = args.floats(past, batch * channels * (taps - 1), "past");
    job.weight = args.floats(weight, channels * taps, "weight");
    job.decay_log = args.floats(decay_log, value_heads, "decay_log");
    job.time_bias = args.floats(time_bias, value_heads, "time_bias");
    if (lengths) job.lengths = args.longs(*lengths, batch, "lengths");
    auto out = [](Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); };
    job.q = out(q), job.k = out(k), job.v = out(v), job.g = out(g), job.beta = out(beta);
    job.next = out(next);
    job.batch = int(batch), job.tokens = int(tokens), job.taps = int(taps);
    job.key_heads = int(key_heads), job.key_dim = int(key_dim);
    job.value_heads = int(value_heads), job.value_dim = int(value_dim);
    if (batch > 0) EXL3_CUDA_CHECK(run::delta_inputs(job, scope.stream));
    return {q, k, v, g, beta, next};
}

// Everything but the states.
run::DeltaRuleJob delta_rule_job(Arguments& args, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& g, const Tensor& beta, Tensor& out) {
    check_dim(q, 4, "q");
    check_dim(v, 4, "v");
    const int64_t batch = q.size(0), tokens = q.size(1), key_heads = q.size(2), key_dim = q.size(3);
    const int64_t value_heads = v.size(2), value_dim = v.size(3),
                  gates = batch * tokens * value_heads;
    STD_TORCH_CHECK(key_heads > 0 && value_heads > 0 && value_heads % key_heads == 0 &&
                        key_dim <= run::kMaxKeyDim,
                    "gated_delta_rule: ", key_heads, " key heads of ", key_dim, " (at most ",
                    run::kMaxKeyDim, "), ", value_heads, " value heads");
    run::DeltaRuleJob job{};
    job.q = args.array(q, q.numel(), "q");
    job.k = args.array(k, q.numel(), "k");
    job.v = args.array(v, gates * value_dim, "v");
    job.g = args.floats(g, gates, "g");
    job.beta = args.floats(beta, gates, "beta");
    job.out = Arguments::result(out);
    checked_int(batch * value_heads, "heads");
    job.batch = int(batch), job.tokens = checked_int(tokens, "tokens");
    job.key_heads = int(key_heads), job.key_dim = int(key_dim);
    job.value_heads = int(value_heads), job.value_dim = checked_int(value_dim, "value_dim");
    return job;
}

std::tuple<Tensor, Tensor> gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& g, const Tensor& beta,
                                            const Tensor& state) {
    const CudaScope scope(q);
    Arguments args(q);
    Tensor out = empty(shape_of(v), v.scalar_type(), v);
    run::DeltaRuleJob job = delta_rule_job(args, q, k, v, g, beta, out);
    Tensor new_state = empty({q.size(0), v.size(2), q.size(3), v.size(3)}, ScalarType::Float, q);
    job.state = args.floats(state, new_state.numel(), "state");
    job.new_state = static_cast<float*>(new_state.mutable_data_ptr());
    if (new_state.numel() > 0) EXL3_CUDA_CHECK(run::delta_rule(job, scope.stream));
    return {out, new_state};
}

Tensor advance_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                          const Tensor& beta, Tensor states, const Tensor& slots,
                          const Tensor& is_new) {
    const CudaScope scope(q);
    Arguments args(q);
    Tensor out = empty(shape_of(v), v.scalar_type(), v);
    run::DeltaRuleJob job = delta_rule_job(args, q, k, v, g, beta, out);
    check_dim(states, 4, "states");
    check_dtype(states, ScalarType::Float, "states");
    STD_TORCH_CHECK(states.is_contiguous() && states.is_cuda() &&
                        states.get_device_index() == q.get_device_index() &&
                        states.size(1) == v.size(2) && states.size(2) == q.size(3) &&
                        states.size(3) == v.size(3),
                    "states must be contiguous (slots, v heads, dk, dv) on the device of q");
    job.new_state = static_cast<float*>(states.mutable_data_ptr());
    job.state = job.new_state;
    job.slots = args.longs(slots, q.size(0), "slots");
    job.is_new = args.bools(is_new, q.size(0), "is_new");
    if (q.size(0) > 0) EXL3_CUDA_CHECK(run::delta_rule(job, scope.stream));
    return out;
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CUDA, m) {
    m.impl("rms_norm", TORCH_BOX(&exl3::rms_norm));
    m.impl("norm_rotate", TORCH_BOX(&exl3::norm_rotate));
    m.impl("gate_mul", TORCH_BOX(&exl3::gate_mul));
    m.impl("delta_inputs", TORCH_BOX(&exl3::delta_inputs));
    m.impl("gated_delta_rule", TORCH_BOX(&exl3::gated_delta_rule));
    m.impl("advance_delta_rule", TORCH_BOX(&exl3::advance_delta_rule));
}
