// Trellis search with AVX2 and FMA: 8 candidates in a vector.

#include <immintrin.h>

#include "cpu/viterbi_step.h"

namespace exl3::viterbi {

namespace {

struct Avx2 {
    using Reg = __m256;
    static constexpr int lanes = 8;

    static Reg load(const float* p) { return _mm256_load_ps(p); }
    static void store(float* p, Reg a) { _mm256_store_ps(p, a); }
    static Reg set1(float a) { return _mm256_set1_ps(a); }
    static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    static Reg min(Reg a, Reg b) {
        return _mm256_castsi256_ps(
            _mm256_min_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
    }

    template <int n>
    static Reg expand(const float* p) {
        if constexpr (n == 1) {
            return _mm256_broadcast_ss(p);
        } else if constexpr (n == 2) {
            return _mm256_castpd_ps(_mm256_broadcast_sd((const double*)p));
        } else {
            return _mm256_broadcast_ps((const __m128*)p);
        }
    }

    // Lane l = out * n + in goes to in * (8 / n) + out.
    template <int n>
    static Reg collect(Reg a) {
        if constexpr (n == 1) {
            return a;
        } else if constexpr (n == 2) {
            return _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        } else {
            return _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        }
    }
};

}  // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels = make_kernels<Avx2>();
    return kernels;
}

}  // namespace exl3::viterbi
