// The gated delta rule: for every value head a matrix that decays, forgets and learns, token by
// token.
//
//     S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
//
// The columns of S are independent. A block of 128 threads owns 32 columns of one head: lane l of
// a warp holds, of column l / 4, the rows l % 4, l % 4 + 4, ..., in registers for the whole pass.
// Sums over rows are register sums and two shuffles. q and k of a token go through shared memory
// (two buffers, so one barrier a token suffices) and are fetched a token ahead.
//
// Decode reads and writes each state once, and that is its cost (6 MB for 48 heads of 128 x 128).
// A long prompt is bound by the latency of the token loop.

#include "run_path.cuh"

namespace exl3::run {
namespace {

constexpr int kThreads = 128, kColumns = 32, kSplit = 4;
constexpr int kFetches = kMaxKeyDim / kThreads;

template <int Rows>  // of a thread; key_dim <= 4 * Rows
__global__ void __launch_bounds__(kThreads) delta_rule_kernel(DeltaRuleJob job) {
    __shared__ float keys[2][kSplit * Rows], queries[2][kSplit * Rows];
    const int thread = threadIdx.x, part = thread % kSplit;
    const int column = blockIdx.y * kColumns + thread / kSplit;
    const bool has_column = column < job.value_dim;
    const int head = blockIdx.x % job.value_heads;
    const int64_t row = blockIdx.x / job.value_heads;
    const int key_head = head / (job.value_heads / job.key_heads);
    const int64_t slot = job.slots == nullptr ? row : job.slots[row];
    const int64_t matrix = (slot * job.value_heads + head) * job.key_dim * job.value_dim + column;
    const bool has_past = has_column && !(job.is_new != nullptr && job.is_new[row]);

    float state[Rows];
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        const int r = i * kSplit + part;
        state[i] =
            has_past && r < job.key_dim ? job.state[matrix + int64_t(r) * job.value_dim] : 0.f;
    }
    for (int i = thread; i < 2 * kSplit * Rows; i += kThreads)
        (&keys[0][0])[i] = (&queries[0][0])[i] = 0.f;

    float next_key[kFetches], next_query[kFetches], next_value = 0.f, next_decay = 0.f,
                                                    next_beta = 0.f;
    auto fetch = [&](int token) {
        const int64_t place = row * job.tokens + token;
        const int64_t key = (place * job.key_heads + key_head) * job.key_dim;
        const int64_t value = place * job.value_heads + head;
#pragma unroll
        for (int j = 0; j < kFetches; ++j) {
            const int i = thread + j * kThreads;
            if (i < job.key_dim)
                next_key[j] = load(job.k, key + i), next_query[j] = load(job.q, key + i);
        }
        if (has_column) next_value = load(job.v, value * job.value_dim + column);
        next_decay = job.g[value];
        next_beta = job.beta[value];
    };
    if (job.tokens > 0) fetch(0);
    __syncthreads();  // the zeros are in place

    for (int token = 0; token < job.tokens; ++token) {
        float* k = keys[token % 2];
        float* q = queries[token % 2];
#pragma unroll
        for (int j = 0; j < kFetches; ++j) {
            const int i = thread + j * kThreads;
            if (i < job.key_dim) k[i] = next_key[j], q[i] = next_query[j];
        }
        const float value = next_value, decay = expf(next_decay), beta = next_beta;
        // Also: whoever still reads the other buffer is at most one token behind.
        __syncthreads();
        if (token + 1 < job.tokens) fetch(token + 1);

        float recalled = 0.f;
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            state[i] *= decay;
            recalled += state[i] * k[i * kSplit + part];
        }
        recalled += __shfl_xor_sync(~0u, recalled, 1);
        recalled += __shfl_xor_sync(~0u, recalled, 2);
        const float write = (value - recalled) * beta;
        float out = 0.f;
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            state[i] += k[i * kSplit + part] * write;
            out += state[i] * q[i * kSplit + part];
        }
        out += __shfl_xor_sync(~0u, out, 1);
        out += __shfl_xor_sync(~0u, out, 2);
        if (has_column && part == 0) {
            const int64_t place = (row * job.tokens + token) * job.value_heads + head;
            store(job.out, place * job.value_dim + column, out);
        }
    }
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        const int r = i * kSplit + part;
        if (has_column && r < job.key_dim)
            job.new_state[matrix + int64_t(r) * job.value_dim] = state[i];
    }
}

}  // namespace

cudaError_t delta_rule(const DeltaRuleJob& job, cudaStream_t stream) {
    const dim3 grid(job.batch * job.value_heads, (job.value_dim + kColumns - 1) / kColumns);
    const int rows = (job.key_dim + kSplit - 1) / kSplit;
    auto kernel = rows <= 8    ? delta_rule_kernel<8>
                  : rows <= 16 ? delta_rule_kernel<16>
                  : rows <= 32 ? delta_rule_kernel<32>
                               : delta_rule_kernel<64>;
    kernel<<<grid, kThreads, 0, stream>>>(job);
    return cudaGetLastError();
}

}  // namespace exl3::run
