// The small kernels between the linears of a model: norms, rotation, gates, the inputs of the delta
// rule. Each replaces a chain of 2 to 25 elementwise kernels. In decode such a chain is all launch
// latency: a token touches a few kilobytes here and hundreds of megabytes of weights elsewhere.
// Arithmetic is float32, one rounding at the end.

#include <algorithm>
#include <iterator>

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

// One warp a row of at most 128 * Held elements, for the many short rows of heads.
template <int Held>
__global__ void __launch_bounds__(256) short_rms_norm_kernel(NormJob job) {
    const int lane = threadIdx.x & 31;
    const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
    if (row >= job.rows) return;
    float4 x[Held];
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < Held; ++j) {
        const int i = 128 * j + 4 * lane;
        x[j] = i < job.size ? load4(job.x, row * job.size + i) : float4{};
        squares += x[j].x * x[j].x + x[j].y * x[j].y + x[j].z * x[j].z + x[j].w * x[j].w;
    }
    const float inverse = rsqrtf(warp_sum(squares) / job.size + job.eps);
#pragma unroll
    for (int j = 0; j < Held; ++j) {
        const int i = 128 * j + 4 * lane;
        if (i >= job.size) continue;
        const float4 s = *reinterpret_cast<const float4*>(job.scale + i);
        float4 y = {x[j].x * inverse * s.x, x[j].y * inverse * s.y, x[j].z * inverse * s.z,
                    x[j].w * inverse * s.w};
        if (job.gate.data != nullptr) {
            const float4 g = load4(job.gate, row * job.size + i);
            y.x *= g.x * sigmoid(g.x), y.y *= g.y * sigmoid(g.y);
            y.z *= g.z * sigmoid(g.z), y.w *= g.w * sigmoid(g.w);
        }
        store4(job.out, row * job.size + i, y);
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

__global__ void gate_mul_kernel(GateJob job, bool fours) {
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    auto gated = [&](float gate, float x) {
        return x * (job.silu ? gate * sigmoid(gate) : sigmoid(gate));
    };
    if (fours) {
        for (i *= 4; i < job.count; i += 4 * stride) {
            const float4 g = load4(job.gate, i), x = load4(job.x, i);
            store4(job.out, i,
                   {gated(g.x, x.x), gated(g.y, x.y), gated(g.z, x.z), gated(g.w, x.w)});
        }
        return;
    }
    for (; i < job.count; i += stride)
        store(job.out, i, gated(load(job.gate, i), load(job.x, i)));
}

// Which channels a head of the inputs has: first the q heads, then k, then v.
struct HeadOfInputs {
    bool is_value, is_query;
    int number, dim, first, channels;

    __device__ __forceinline__ HeadOfInputs(const DeltaInputsJob& job, int head)
        : is_value(head >= 2 * job.key_heads), is_query(head < job.key_heads) {
        const int keys = 2 * job.key_heads * job.key_dim;
        number = is_value ? head - 2 * job.key_heads : is_query ? head : head - job.key_heads;
        dim = is_value ? job.value_dim : job.key_dim;
        first = is_value ? keys + number * job.value_dim : head * job.key_dim;
        channels = keys + job.value_heads * job.value_dim;
    }
    __device__ __forceinline__ float* out(const DeltaInputsJob& job, int64_t place) const {
        if (is_value) return job.v + (place * job.value_heads + number) * dim;
        return (is_query ? job.q : job.k) + (place * job.key_heads + number) * dim;
    }
    // Of a key or query with this sum of squares.
    __device__ __forceinline__ float factor(float squares) const {
        const float norm = rsqrtf(squares + 1e-6f);
        return is_query ? norm * rsqrtf(float(dim)) : norm;
    }
};

// Decay and write strength of a value head at a token of a row.
__device__ __forceinline__ void delta_gates(const DeltaInputsJob& job, int head, int64_t place,
                                            bool is_real) {
    const int64_t at = place * job.value_heads + head;
    const float x = load(job.a, at) + job.time_bias[head];
    const float softplus = x > 20.f ? x : log1pf(expf(x));  // as torch does
    job.g[at] = is_real ? -expf(job.decay_log[head]) * softplus : 0.f;
    job.beta[at] = is_real ? sigmoid(load(job.b, at)) : 0.f;
}

// One warp a head and kRun tokens, four channels a lane, 4 taps: every input is read once.
constexpr int kRun = 8, kRunWarps = 4;
__global__ void __launch_bounds__(32 * kRunWarps) delta_runs_kernel(DeltaInputsJob job) {
    const int lane = threadIdx.x & 31, row = blockIdx.z;
    const int begin = (blockIdx.y * kRunWarps + threadIdx.x / 32) * kRun;
    const int end = min(begin + kRun, job.tokens);
    if (begin >= end) return;
    const HeadOfInputs head(job, blockIdx.x);
    const bool is_active = 4 * lane < head.dim;
    const int channel = head.first + (is_active ? 4 * lane : 0);
    const float* past = job.past + (int64_t(row) * head.channels + channel) * 3;
    auto input = [&](int time) -> float4 {
        if (time < 0) return {past[3 + time], past[6 + time], past[9 + time], past[12 + time]};
        return load4(job.qkv, (int64_t(row) * job.tokens + time) * head.channels + channel);
    };
    float4 weight[4];  // of a channel: taps
#pragma unroll
    for (int c = 0; c < 4; ++c)
        weight[c] = reinterpret_cast<const float4*>(job.weight)[channel + c];
    const int length = job.lengths == nullptr ? job.tokens : int(job.lengths[row]);
    float4 x0 = input(begin - 3), x1 = input(begin - 2), x2 = input(begin - 1);
    for (int token = begin; token < end; ++token) {
        const float4 x3 = input(token);
        auto mixed = [](const float4& w, float a, float b, float c, float d) {
            const float y = fmaf(w.w, d, fmaf(w.z, c, fmaf(w.y, b, w.x * a)));
            return y * sigmoid(y);
        };
        float4 y = {
            mixed(weight[0], x0.x, x1.x, x2.x, x3.x), mixed(weight[1], x0.y, x1.y, x2.y, x3.y),
            mixed(weight[2], x0.z, x1.z, x2.z, x3.z), mixed(weight[3], x0.w, x1.w, x2.w, x3.w)};
        const int64_t place = int64_t(row) * job.tokens + token;
        if (!head.is_value) {
            const float squares = y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
            const float factor = head.factor(warp_sum(is_active ? squares : 0.f));
            y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
        } else if (lane == 0) {
            delta_gates(job, head.number, place, token < length);
        }
        if (is_active) reinterpret_cast<float4*>(head.out(job, place))[lane] = y;
        x0 = x1, x1 = x2, x2 = x3;
    }
    if (begin == 0 && is_active) {
        float4* next =
            reinterpret_cast<float4*>(job.next + (int64_t(row) * head.channels + channel) * 3);
        const float4 a = input(length - 3), b = input(length - 2), c = input(length - 1);
        next[0] = {a.x, b.x, c.x, a.y};
        next[1] = {b.y, c.y, a.z, b.z};
        next[2] = {c.z, a.w, b.w, c.w};
    }
}

// Any number of taps and channels: one block a head of a token.
__global__ void delta_inputs_kernel(DeltaInputsJob job) {
    extern __shared__ float mixed[];
    const int token = blockIdx.y, row = blockIdx.z;
    const HeadOfInputs head(job, blockIdx.x);
    const int dim = head.dim, first = head.first, channels = head.channels, kept = job.taps - 1;
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
    const float factor = head.is_value ? 1.f : head.factor(block_sum(squares));
    float* out = head.out(job, place);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[i] = mixed[i] * factor;

    const int length = job.lengths == nullptr ? job.tokens : int(job.lengths[row]);
    if (head.is_value && threadIdx.x == 0) delta_gates(job, head.number, place, token < length);
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
    const unsigned rows = unsigned(job.rows), packs = unsigned((job.rows + 7) / 8);
    const bool fours = takes_fours(job.x.data, job.size) && takes_fours(job.gate.data, job.size) &&
                       takes_fours(job.scale, job.size) && takes_fours(job.out.data, job.size);
    if (fours && job.size <= 128) {
        short_rms_norm_kernel<1><<<packs, 256, 0, stream>>>(job);
    } else if (fours && job.size <= 256) {
        short_rms_norm_kernel<2><<<packs, 256, 0, stream>>>(job);
    } else if (job.size <= 4 * 128) {
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
    const bool fours = takes_fours(job.gate.data, job.count) &&
                       takes_fours(job.x.data, job.count) && takes_fours(job.out.data, job.count);
    const int64_t threads = fours ? job.count / 4 : job.count;
    const int64_t blocks = std::min<int64_t>((threads + 255) / 256, 16384);
    gate_mul_kernel<<<unsigned(blocks), 256, 0, stream>>>(job, fours);
    return cudaGetLastError();
}

cudaError_t delta_inputs(const DeltaInputsJob& job, cudaStream_t stream) {
    const dim3 grid(2 * job.key_heads + job.value_heads, job.tokens, job.batch);
    const int dim = std::max(job.key_dim, job.value_dim);
    const void* arrays[] = {job.qkv.data, job.weight, job.q, job.k, job.v, job.next};
    const bool fours =
        job.taps == 4 && dim <= 128 &&
        std::all_of(std::begin(arrays), std::end(arrays), [&](const void* data) {
            return takes_fours(data, job.key_dim) && takes_fours(data, job.value_dim);
        });
    if (fours) {
        const int runs = (job.tokens + kRun * kRunWarps - 1) / (kRun * kRunWarps);
        delta_runs_kernel<<<dim3(grid.x, runs, grid.z), 32 * kRunWarps, 0, stream>>>(job);
        return cudaGetLastError();
    }
    delta_inputs_kernel<<<grid, threads_for(dim), dim * sizeof(float), stream>>>(job);
    return cudaGetLastError();
}

}  // namespace exl3::run
