// Trellis search with AVX-512: 16 candidates in a vector.

#include <immintrin.h>

#include "cpu/viterbi_step.h"

namespace exl3::viterbi {

namespace {

struct Avx512 {
    using Reg = __m512;
    static constexpr int lanes = 16;

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

    template <int n>
    static Reg expand(const float* p) {
        if constexpr (n == 1) {
            return _mm512_set1_ps(*p);
        } else if constexpr (n == 2) {
            return _mm512_broadcast_f32x2(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p)));
        } else if constexpr (n == 4) {
            return _mm512_broadcast_f32x4(_mm_load_ps(p));
        } else {
            return _mm512_broadcast_f32x8(_mm256_load_ps(p));
        }
    }

    // Lane l = out * n + in goes to in * (16 / n) + out.
    template <int n>
    static Reg collect(Reg a) {
        if constexpr (n == 1) {
            return a;
        } else {
            constexpr int fan = lanes / n;
            const auto lane =
                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const auto out = _mm512_and_si512(lane, _mm512_set1_epi32(fan - 1));
            const auto in = _mm512_srli_epi32(lane, __builtin_ctz(fan));
            const auto from = _mm512_add_epi32(_mm512_slli_epi32(out, __builtin_ctz(n)), in);
            return _mm512_permutexvar_ps(from, a);
        }
    }
};

}  // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kernels = make_kernels<Avx512>();
    return kernels;
}

}  // namespace exl3::viterbi
