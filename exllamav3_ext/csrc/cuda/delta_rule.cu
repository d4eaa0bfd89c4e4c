// The gated delta rule: for every value head a matrix that decays, forgets and learns, token by
// token.
//
//     S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
//
// The columns of S are independent. A warp owns 8 columns of one head; lane 8 c + p holds, of
// columns 2 c and 2 c + 1, the rows 4 p .. 4 p + 3 of every 32, in registers for the whole pass. A
// block has two warps for a prompt, which spreads over more multiprocessors, and four for one
// token, which reads whole lines of memory. Sums over rows are register sums and three shuffles;
// the results of four tokens are summed together. What tokens bring (q, k, values, gates) comes
// through shared memory, several tokens at a time and asynchronously, so a token costs neither a
// barrier nor a wait for memory.
//
// Decode reads and writes each state once, and that is its cost (6 MB for 48 heads of 128 x 128). A
// long prompt is bound by instruction issue and by the latency of the sums: a token's writes depend
// on the sums of the token before.

#include "ptx.cuh"
#include "run_path.cuh"

namespace exl3::run {
namespace {

constexpr int kParts = 8;

// Tokens in shared memory. Rows: of a lane, a multiple of 4; key_dim <= 8 * Rows.
template <int Rows, int Count>
struct Tokens {
    static constexpr int kCount = Count, kTogether = Count < 4 ? Count : 4;
    static constexpr int kThreads = Count == 1 ? 128 : 64, kColumns = kThreads / 4;
    float4 keys[kCount][kParts * Rows / 4], queries[kCount][kParts * Rows / 4];
    float values[kCount][kColumns];
    float decay[kCount], beta[kCount];
};

// Copies `length` numbers from element `from` of an array; asynchronously where they are float32
// and every run starts on 16 bytes (`is_fast`).
__device__ __forceinline__ void fetch_run(float* to, const Array& array, int64_t from, int length,
                                          int index, bool is_fast) {
    if (is_fast) {
        if (4 * index < length)
            copy_async16(shared_address(to + 4 * index),
                         static_cast<const float*>(array.data) + from + 4 * index);
        return;
    }
#pragma unroll
    for (int i = 4 * index; i < 4 * index + 4; ++i)
        if (i < length) to[i] = load(array, from + i);
}

__device__ __forceinline__ bool is_fast(const Array& array, int run) {
    return array.type == Type::kFloat && run % 4 == 0 &&
           reinterpret_cast<uintptr_t>(array.data) % 16 == 0;
}

// Sums of N values each over the eight lanes of a column pair: afterwards lane p has, in the first,
// the sum of value p % N. Whatever N, the lanes are added in the same order.
template <int N>
__device__ __forceinline__ void sum_of_parts(float (&x)[N]) {
    int values = N;
#pragma unroll
    for (int lanes = kParts / 2; lanes > 0; lanes /= 2) {
        if (values > lanes) {  // half of the values stay here, half go there
            values /= 2;
            const bool upper = threadIdx.x & lanes;
#pragma unroll
            for (int j = 0; j < N / 2; ++j)
                if (j < values) {
                    const float there = __shfl_xor_sync(~0u, upper ? x[j] : x[j + values], lanes);
                    x[j] = (upper ? x[j + values] : x[j]) + there;
                }
        } else {
#pragma unroll
            for (int j = 0; j < N; ++j)
                if (j < values) x[j] += __shfl_xor_sync(~0u, x[j], lanes);
        }
    }
}

template <int Rows, int Count>
__global__ void __launch_bounds__(Tokens<Rows, Count>::kThreads)
    delta_rule_kernel(DeltaRuleJob job) {
    using Stage = Tokens<Rows, Count>;
    constexpr int kThreads = Stage::kThreads, kColumns = Stage::kColumns;
    extern __shared__ float4 dynamic[];
    auto* const stages = reinterpret_cast<Stage*>(dynamic);  // two
    const int thread = threadIdx.x, part = thread % kParts, first_column = blockIdx.y * kColumns;
    const int mine = thread / kParts * 2, column = first_column + mine;
    const int columns = min(kColumns, job.value_dim - first_column);
    const int head = blockIdx.x % job.value_heads;
    const int64_t row = blockIdx.x / job.value_heads;
    const int key_head = head / (job.value_heads / job.key_heads);
    const int64_t slot = job.slots == nullptr ? row : job.slots[row];
    const int64_t matrix = (slot * job.value_heads + head) * job.key_dim * job.value_dim + column;
    const bool has_past = !(job.is_new != nullptr && job.is_new[row]);
    const bool fast_keys = is_fast(job.k, job.key_dim) && is_fast(job.q, job.key_dim),
               fast_values = is_fast(job.v, job.value_dim);

    auto fetch = [&](int first, Stage& stage) {
        const int count = min(Stage::kCount, job.tokens - first);
        const int64_t place = row * job.tokens + first;
        constexpr int kPieces = 2 * Rows;  // of a key
        for (int i = thread; i < count * kPieces; i += kThreads) {
            const int token = i / kPieces, piece = i % kPieces;
            const int64_t from = ((place + token) * job.key_heads + key_head) * job.key_dim;
            auto run = [&](float4* to, const Array& array) {
                fetch_run(reinterpret_cast<float*>(to), array, from, job.key_dim, piece, fast_keys);
            };
            run(stage.keys[token], job.k);
            run(stage.queries[token], job.q);
        }
        constexpr int kValues = kColumns / 4;  // pieces of a token
        if (thread < kValues * count) {
            const int64_t from = (place + thread / kValues) * job.value_heads + head;
            fetch_run(stage.values[thread / kValues], job.v, from * job.value_dim + first_column,
                      columns, thread % kValues, fast_values);
        }
        if (thread < count) {
            const int64_t from = (place + thread) * job.value_heads + head;
            stage.decay[thread] = expf(job.g[from]);
            stage.beta[thread] = job.beta[from];
        } else if (thread < Stage::kCount) {  // tokens that change nothing, to the end of a group
            stage.decay[thread] = 1.f;
            stage.beta[thread] = 0.f;
        }
        for (int i = count * kPieces + thread; i < Stage::kCount * kPieces; i += kThreads)
            stage.keys[i / kPieces][i % kPieces] = {0.f, 0.f, 0.f, 0.f};
        for (int i = count * kColumns + thread; i < Stage::kCount * kColumns; i += kThreads)
            stage.values[i / kColumns][i % kColumns] = 0.f;
        commit_copies();
    };
    if (job.key_dim < kParts * Rows || columns < kColumns) {  // what no copy reaches stays zero
        for (int i = thread; i < int(2 * sizeof(Stage) / sizeof(float4)); i += kThreads)
            dynamic[i] = {0.f, 0.f, 0.f, 0.f};
        __syncthreads();
    }

    float2 state[Rows];
    auto at = [&](int i) { return 32 * (i / 4) + 4 * part + i % 4; };  // row of register i
    const bool pairs = job.value_dim % 2 == 0 && reinterpret_cast<uintptr_t>(job.state) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(job.new_state) % 8 == 0;
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        state[i] = {0.f, 0.f};
        if (!has_past || at(i) >= job.key_dim || mine >= columns) continue;
        const float* from = job.state + matrix + int64_t(at(i)) * job.value_dim;
        if (pairs)
            state[i] = *reinterpret_cast<const float2*>(from);
        else
            state[i] = {from[0], mine + 1 < columns ? from[1] : 0.f};
    }
    if (job.tokens > 0) fetch(0, stages[0]);

    for (int first = 0; first < job.tokens; first += Stage::kCount) {
        wait_copies<0>();
        __syncthreads();  // this stage has come, and everyone has left the other one
        const Stage& stage = stages[first / Stage::kCount % 2];
        if (first + Stage::kCount < job.tokens)
            fetch(first + Stage::kCount, stages[(first / Stage::kCount + 1) % 2]);
        const int count = min(Stage::kCount, job.tokens - first);
        constexpr int kTogether = Stage::kTogether;
        for (int group = 0; group < count; group += kTogether) {
            float out[2 * kTogether];  // token, column
#pragma unroll
            for (int t = 0; t < kTogether; ++t) {
                const int token = group + t;
                const float decay = stage.decay[token], beta = stage.beta[token];
                const float2 value = *reinterpret_cast<const float2*>(&stage.values[token][mine]);
                float key[Rows], x = 0.f, y = 0.f, odd_x = 0.f, odd_y = 0.f;  // shorter chains
#pragma unroll
                for (int i = 0; i < Rows; i += 4) {
                    const float4 k = stage.keys[token][2 * i + part];
                    key[i] = k.x, key[i + 1] = k.y, key[i + 2] = k.z, key[i + 3] = k.w;
                }
#pragma unroll
                for (int i = 0; i < Rows; i += 2) {
                    state[i].x *= decay, state[i].y *= decay;
                    state[i + 1].x *= decay, state[i + 1].y *= decay;
                    x = fmaf(state[i].x, key[i], x), y = fmaf(state[i].y, key[i], y);
                    odd_x = fmaf(state[i + 1].x, key[i + 1], odd_x);
                    odd_y = fmaf(state[i + 1].y, key[i + 1], odd_y);
                }
                x += odd_x, y += odd_y;
#pragma unroll
                for (int lanes = 1; lanes < kParts; lanes *= 2) {
                    x += __shfl_xor_sync(~0u, x, lanes);
                    y += __shfl_xor_sync(~0u, y, lanes);
                }
                const float write_x = (value.x - x) * beta, write_y = (value.y - y) * beta;
                x = y = odd_x = odd_y = 0.f;
#pragma unroll
                for (int i = 0; i < Rows; i += 4) {
                    const float4 q = stage.queries[token][2 * i + part];
                    const float query[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float2& s = state[i + j];
                        s = {fmaf(key[i + j], write_x, s.x), fmaf(key[i + j], write_y, s.y)};
                        float &sum_x = j % 2 ? odd_x : x, &sum_y = j % 2 ? odd_y : y;
                        sum_x = fmaf(s.x, query[j], sum_x), sum_y = fmaf(s.y, query[j], sum_y);
                    }
                }
                out[2 * t] = x + odd_x, out[2 * t + 1] = y + odd_y;
            }
            sum_of_parts(out);
            const int token = first + group + part / 2, c = part % 2;
            if (part < 2 * kTogether && token < first + count && mine + c < columns) {
                const int64_t place = (row * job.tokens + token) * job.value_heads + head;
                store(job.out, place * job.value_dim + column + c, out[0]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        if (at(i) >= job.key_dim || mine >= columns) continue;
        float* to = job.new_state + matrix + int64_t(at(i)) * job.value_dim;
        if (pairs) {
            *reinterpret_cast<float2*>(to) = state[i];
        } else {
            to[0] = state[i].x;
            if (mine + 1 < columns) to[1] = state[i].y;
        }
    }
}

template <int Rows, int Count>
cudaError_t launch(const DeltaRuleJob& job, cudaStream_t stream) {
    using Stage = Tokens<Rows, Count>;
    const dim3 grid(job.batch * job.value_heads,
                    (job.value_dim + Stage::kColumns - 1) / Stage::kColumns);
    delta_rule_kernel<Rows, Count><<<grid, Stage::kThreads, 2 * sizeof(Stage), stream>>>(job);
    return cudaGetLastError();
}

template <int Rows>
cudaError_t launch(const DeltaRuleJob& job, cudaStream_t stream) {
    return job.tokens > 1 ? launch<Rows, Rows <= 16 ? 16 : 8>(job, stream)
                          : launch<Rows, 1>(job, stream);
}

}  // namespace

cudaError_t delta_rule(const DeltaRuleJob& job, cudaStream_t stream) {
    const int rows = (job.key_dim + kParts - 1) / kParts;
    return rows <= 4    ? launch<4>(job, stream)
           : rows <= 8  ? launch<8>(job, stream)
           : rows <= 16 ? launch<16>(job, stream)
                        : launch<32>(job, stream);
}

}  // namespace exl3::run
