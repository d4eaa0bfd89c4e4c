// Launches of the small kernels between the linears; includes no torch header. See run_path.cu and
// delta_rule.cu.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace exl3::run {

enum class Type : int { kHalf = 0, kFloat = 1, kBFloat16 = 2 };

// An array whose element type is known at run time.
struct Array {
    const void* data = nullptr;
    Type type = Type::kFloat;
};

struct MutableArray {
    void* data = nullptr;
    Type type = Type::kFloat;
};

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * scale, times silu(gate[r]) if there is a gate.
struct NormJob {
    Array x, gate;
    const float* scale;
    MutableArray out;
    int64_t rows;
    int size;
    float eps;
};
cudaError_t rms_norm(const NormJob& job, cudaStream_t stream);

// Heads of x, strided except inside a head: RMS norm (if there is a scale), then the rotation of
// the first 2 * half lanes. out is contiguous.
struct RotateJob {
    Array x;
    int64_t batch_stride, token_stride, head_stride;
    const float* scale;
    const float *cos, *sin;  // (batch, tokens, half)
    MutableArray out;
    int batch, tokens, heads, head_dim, half;
    float eps;
};
cudaError_t norm_rotate(const RotateJob& job, cudaStream_t stream);

// out = x * silu(gate), or x * sigmoid(gate).
struct GateJob {
    Array gate, x;
    MutableArray out;
    int64_t count;
    bool silu;
};
cudaError_t gate_mul(const GateJob& job, cudaStream_t stream);

// What a gated delta net does between its projections and the recurrence. Shapes as in
// exllamav3/ops/run_path.py.
struct DeltaInputsJob {
    Array qkv, a, b;
    const float *past, *weight, *decay_log, *time_bias;
    const int64_t* lengths;  // or null
    float *q, *k, *v, *g, *beta, *next;
    int batch, tokens, key_heads, key_dim, value_heads, value_dim, taps;
};
cudaError_t delta_inputs(const DeltaInputsJob& job, cudaStream_t stream);

struct DeltaRuleJob {
    Array q, k, v;
    const float *g, *beta;
    const float* state;
    float* new_state;      // may be `state`
    const int64_t* slots;  // which of the states is a row's, or null for its own number
    const bool* is_new;    // rows that begin with zeros, or null for none
    MutableArray out;
    int batch, tokens, key_heads, key_dim, value_heads, value_dim;
};
inline constexpr int kMaxKeyDim = 256;
cudaError_t delta_rule(const DeltaRuleJob& job, cudaStream_t stream);

}  // namespace exl3::run
