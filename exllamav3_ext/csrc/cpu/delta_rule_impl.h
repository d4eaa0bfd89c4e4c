// One token of one head of the gated delta rule, in float32:
//     S <- decay S;  delta = beta (v - S^T k);  S <- S + k delta^T;  out = S^T q
// S is dk x dv, rows contiguous. Two passes over S, which stays in L1 or L2 between tokens.

#pragma once

#include <cstdint>

namespace exl3 {
namespace {

void delta_step(const float* q, const float* k, const float* v, float decay, float beta, int64_t dk,
                int64_t dv, float* __restrict state, float* __restrict delta,
                float* __restrict out) {
    for (int64_t j = 0; j < dv; ++j) delta[j] = 0.0f;
    for (int64_t i = 0; i < dk; ++i) {
        float* row = state + i * dv;
        const float ki = k[i];
        for (int64_t j = 0; j < dv; ++j) {
            row[j] *= decay;
            delta[j] += row[j] * ki;
        }
    }
    for (int64_t j = 0; j < dv; ++j) {
        delta[j] = (v[j] - delta[j]) * beta;
        out[j] = 0.0f;
    }
    for (int64_t i = 0; i < dk; ++i) {
        float* row = state + i * dv;
        const float ki = k[i], qi = q[i];
        for (int64_t j = 0; j < dv; ++j) {
            row[j] += ki * delta[j];
            out[j] += row[j] * qi;
        }
    }
}

}  // namespace
}  // namespace exl3
