// Trellis search with AVX2 and FMA: 8 candidates in a vector.

#include <immintrin.h>

#include "cpu/viterbi_step.h"

namespace exl3::viterbi {

namespace {

struct Avx2 {
    using Reg = __m256;
    static constexpr int lanes = 8;
    static constexpr int max_vectors = 2;

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

    static Reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
    static unsigned equal_mask(Reg a, Reg b) {
        return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
    }

    // a0 b0 a1 b1 ... of two vectors, as two vectors.
    static void interleave(Reg a, Reg b, Reg& low, Reg& high) {
        const Reg even = _mm256_unpacklo_ps(a, b), odd = _mm256_unpackhi_ps(a, b);
        low = _mm256_permute2f128_ps(even, odd, 0x20);
        high = _mm256_permute2f128_ps(even, odd, 0x31);
    }
};

}  // namespace

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels = make_kernels<Avx2>();
    return kernels;
}

}  // namespace exl3::viterbi
