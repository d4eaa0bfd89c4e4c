// Trellis search with AVX-512: 16 candidates in a vector.

#include <immintrin.h>

#include "cpu/viterbi_step.h"

namespace exl3::viterbi {

namespace {

struct Avx512 {
    using Reg = __m512;
    static constexpr int lanes = 16;
    static constexpr int max_vectors = 1;

    static Reg load(const float* p) { return _mm512_load_ps(p); }
    static void store(float* p, Reg a) { _mm512_store_ps(p, a); }
    static Reg set1(float a) { return _mm512_set1_ps(a); }
    static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    // On the bits: the integer minimum runs on more ports than the one of floats.
    static Reg min(Reg a, Reg b) {
        return _mm512_castsi512_ps(
            _mm512_min_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }

    static Reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
    static unsigned equal_mask(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

    // a0 b0 a1 b1 ... of two vectors, as two vectors.
    static void interleave(Reg a, Reg b, Reg& low, Reg& high) {
        const auto lower =
            _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const auto upper =
            _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        low = _mm512_permutex2var_ps(a, lower, b);
        high = _mm512_permutex2var_ps(a, upper, b);
    }
};

}  // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kernels = make_kernels<Avx512>();
    return kernels;
}

}  // namespace exl3::viterbi
