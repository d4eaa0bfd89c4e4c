// The small kernels between the linears of a model: norms, rotation, gates, the inputs of the delta
// rule. Each replaces a chain of 2 to 25 elementwise kernels. In decode such a chain is all launch
// latency: a token touches a few kilobytes here and hundreds of megabytes of weights elsewhere.
// Arithmetic is float32, one rounding at the end.

#include <algorithm>

#include "run_path.cuh"

namespace exl3::run {
namespace {

// One block a row, `Held` elements a thread, or any number if `Held` is 0. Held elements and their
// scales are fetched together: a lone row is all latency, and the scales come from memory.
template <int Held>
__global__ void rms_norm_kernel(NormJob job) {
    const int64_t first = int64_t(blockIdx.x) * job.size;
    float x[Held + 1], scale[Held + 1], squares = 0.f;
#pragma unroll
    for (int j = 0; j < Held; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        x[j] = i < job.size ? load(job.x, first + i) : 0.f;
        scale[j] = i < job.size ? job.scale[i] : 0.f;
    }
#pragma unroll
    for (int j = 0; j < Held; ++j) squares += x[j] * x[j];
    if (Held == 0) {
        for (int i = threadIdx.x; i < job.size; i += blockDim.x) {
            const float value = load(job.x, first + i);
            squares += value * value;
        }
    }
    const float inverse = rsqrtf(block_sum(squares) / job.size + job.eps);
    auto finish = [&](int i, float value, float scale) {
        float y = value * inverse * scale;
        if (job.gate.data != nullptr) {
            const float gate = load(job.gate, first + i);
            y *= gate * sigmoid(gate);
        }
        store(job.out, first + i, y);
    };
#pragma unroll
    for (int j = 0; j < Held; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < job.size) finish(i, x[j], scale[j]);
    }
    if (Held == 0) {
        for (int i = threadIdx.x; i < job.size; i += blockDim.x)
            finish(i, load(job.x, first + i), job.scale[i]);
    }
}

// One block a head of a token. Lane t turns with lane t + half.
__global__ void norm_rotate_kernel(RotateJob job) {
    extern __shared__ float lanes[];
    const int head = blockIdx.x, token = blockIdx.y, row = blockIdx.z;
    const int64_t from = row * job.batch_stride + token * job.token_stride + head * job.head_stride;
    const int64_t place = int64_t(row) * job.tokens + token;
    const int64_t to = (place * job.heads + head) * job.head_dim;
    float squares = 0.f;
    for (int i = threadIdx.x; i < job.head_dim; i += blockDim.x) {
        const float x = load(job.x, from + i);
        squares += x * x;
        lanes[i] = x;
    }
    float inverse = 1.f;
    if (job.scale != nullptr) inverse = rsqrtf(block_sum(squares) / job.head_dim + job.eps);
    __syncthreads();
    auto normed = [&](int i) {
        return job.scale == nullptr ? lanes[i] : lanes[i] * inverse * job.scale[i];
    };
    for (int i = threadIdx.x; i < job.head_dim; i += blockDim.x) {
        float y = normed(i);
        if (i < 2 * job.half) {
            const int pair = i < job.half ? i : i - job.half;
            const float cos = job.cos[place * job.half + pair];
            const float sin = job.sin[place * job.half + pair];
            y = i < job.half ? y * cos - normed(i + job.half) * sin : y * cos + normed(pair) * sin;
        }
        store(job.out, to + i, y);
    }
}

__global__ void gate_mul_kernel(GateJob job) {
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < job.count; i += stride) {
        const float gate = load(job.gate, i);
        const float factor = job.silu ? gate * sigmoid(gate) : sigmoid(gate);
        store(job.out, i, load(job.x, i) * factor);
    }
}

// One block a head (first the q heads, then k, then v) of a token.
__global__ void delta_inputs_kernel(DeltaInputsJob job) {
    extern __shared__ float mixed[];
    const int head = blockIdx.x, token = blockIdx.y, row = blockIdx.z;
    const bool is_value = head >= 2 * job.key_heads;
    const int value_head = head - 2 * job.key_heads;
    const int dim = is_value ? job.value_dim : job.key_dim;
    const int keys = 2 * job.key_heads * job.key_dim;
    const int channels = keys + job.value_heads * job.value_dim;
    const int first = is_value ? keys + value_head * job.value_dim : head * job.key_dim;
    const int kept = job.taps - 1;
    const int64_t place = int64_t(row) * job.tokens + token;
    // Input of a channel at a time of this pass; negative times are the columns kept from before.
    auto input = [&](int channel, int time) {
        return time < 0 ? job.past[(int64_t(row) * channels + channel) * kept + kept + time]
                        : load(job.qkv, (int64_t(row) * job.tokens + time) * channels + channel);
    };

    float squares = 0.f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        const int channel = first + i;
        float y = 0.f;
        for (int tap = 0; tap < job.taps; ++tap)
            y += job.weight[channel * job.taps + tap] * input(channel, token - kept + tap);
        y *= sigmoid(y);
        squares += y * y;
        mixed[i] = y;
    }
    if (is_value) {
        float* out = job.v + (place * job.value_heads + value_head) * dim;
        for (int i = threadIdx.x; i < dim; i += blockDim.x) out[i] = mixed[i];
    } else {
        const bool is_query = head < job.key_heads;
        float factor = rsqrtf(block_sum(squares) + 1e-6f);
        if (is_query) factor *= rsqrtf(float(dim));
        const int key_head = is_query ? head : head - job.key_heads;
        float* out = (is_query ? job.q : job.k) + (place * job.key_heads + key_head) * dim;
        for (int i = threadIdx.x; i < dim; i += blockDim.x) out[i] = mixed[i] * factor;
    }

    const int length = job.lengths == nullptr ? job.tokens : int(job.lengths[row]);
    if (is_value && threadIdx.x == 0) {
        const int64_t at = place * job.value_heads + value_head;
        const float x = load(job.a, at) + job.time_bias[value_head];
        const float softplus = x > 20.f ? x : log1pf(expf(x));  // as torch does
        const bool is_real = token < length;
        job.g[at] = is_real ? -expf(job.decay_log[value_head]) * softplus : 0.f;
        job.beta[at] = is_real ? sigmoid(load(job.b, at)) : 0.f;
    }
    if (token == 0) {
        for (int i = threadIdx.x; i < dim * kept; i += blockDim.x) {
            const int channel = first + i / kept, column = i % kept;
            job.next[(int64_t(row) * channels + channel) * kept + column] =
                input(channel, length - kept + column);
        }
    }
}

int threads_for(int size) { return std::clamp((size + 31) / 32 * 32, 32, 128); }

}  // namespace

cudaError_t rms_norm(const NormJob& job, cudaStream_t stream) {
    const unsigned rows = unsigned(job.rows);
    if (job.size <= 4 * 128) {
        rms_norm_kernel<4><<<rows, threads_for(job.size), 0, stream>>>(job);
    } else if (job.size <= 8 * 1024) {
        rms_norm_kernel<8><<<rows, 1024, 0, stream>>>(job);
    } else {
        rms_norm_kernel<0><<<rows, 1024, 0, stream>>>(job);
    }
    return cudaGetLastError();
}

cudaError_t norm_rotate(const RotateJob& job, cudaStream_t stream) {
    const dim3 grid(job.heads, job.tokens, job.batch);
    norm_rotate_kernel<<<grid, threads_for(job.head_dim), job.head_dim * sizeof(float), stream>>>(
        job);
    return cudaGetLastError();
}

cudaError_t gate_mul(const GateJob& job, cudaStream_t stream) {
    const int64_t blocks = std::min<int64_t>((job.count + 255) / 256, 16384);
    gate_mul_kernel<<<unsigned(blocks), 256, 0, stream>>>(job);
    return cudaGetLastError();
}

cudaError_t delta_inputs(const DeltaInputsJob& job, cudaStream_t stream) {
    const dim3 grid(2 * job.key_heads + job.value_heads, job.tokens, job.batch);
    const int dim = std::max(job.key_dim, job.value_dim);
    delta_inputs_kernel<<<grid, threads_for(dim), dim * sizeof(float), stream>>>(job);
    return cudaGetLastError();
}

}  // namespace exl3::run
