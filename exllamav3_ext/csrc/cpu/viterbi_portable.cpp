// Trellis search without intrinsics: vectors of 4 floats in the compiler's own notation.
//
// Where the machine has no fused multiply-add, it is computed in float64: differences are integers
// below 2^22 and costs are integers below 2^52, so square and sum are exact and the conversion to
// float32 rounds once, which is what a fused multiply-add does.

#include "cpu/viterbi_step.h"

namespace exl3::viterbi {
namespace {

struct Portable {
    typedef float Reg __attribute__((vector_size(16)));
    typedef int Bits __attribute__((vector_size(16)));
    static constexpr int lanes = 4;
    static constexpr int max_vectors = 2;

    static Reg load(const float* p) { return *reinterpret_cast<const Reg*>(p); }
    static void store(float* p, Reg a) { *reinterpret_cast<Reg*>(p) = a; }
    static Reg set1(float a) { return Reg{a, a, a, a}; }
    static Reg sub(Reg a, Reg b) { return a - b; }
    static Reg min(Reg a, Reg b) { return a < b ? a : b; }
#if defined(__FP_FAST_FMAF)
    static float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    static Reg fma(Reg a, Reg b, Reg c) {
        return Reg{fma1(a[0], b[0], c[0]), fma1(a[1], b[1], c[1]), fma1(a[2], b[2], c[2]),
                   fma1(a[3], b[3], c[3])};
    }
#else
    typedef double Wide __attribute__((vector_size(32)));
    static float fma1(float a, float b, float c) { return float(double(a) * b + c); }
    static Reg fma(Reg a, Reg b, Reg c) {
        const Wide exact = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide) +
                           __builtin_convertvector(c, Wide);
        return __builtin_convertvector(exact, Reg);
    }
#endif

    static Reg broadcast(const float* p) { return set1(*p); }
    static unsigned equal_mask(Reg a, Reg b) {
        unsigned mask = 0;
        for (int l = 0; l < lanes; ++l) mask |= unsigned(a[l] == b[l]) << l;
        return mask;
    }

    // a0 b0 a1 b1 ... of two vectors, as two vectors.
    static void interleave(Reg a, Reg b, Reg& low, Reg& high) {
        low = __builtin_shuffle(a, b, Bits{0, 4, 1, 5});
        high = __builtin_shuffle(a, b, Bits{2, 6, 3, 7});
    }
};

}  // namespace

const Kernels& portable_kernels() {
    static constexpr Kernels kernels = make_kernels<Portable>();
    return kernels;
}

}  // namespace exl3::viterbi
