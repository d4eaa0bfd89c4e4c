// The vector type of the instruction set that this file is compiled for, and the few operations
// on it that plain operators do not spell. Included by kernels_*.cpp only; everything here and in
// *_impl.h has internal linkage, so that no AVX-512 code is picked by the linker for other files.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXL3_INLINE [[gnu::always_inline]] inline

namespace exl3 {
namespace {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));

EXL3_INLINE F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

EXL3_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }

// Compilers fold a load into each instruction that uses it. Where a value is used several times and
// loads are the limit, this keeps it loaded once.
EXL3_INLINE void keep_in_register([[maybe_unused]] F& v) {
#if defined(__AVX2__)
    asm("" : "+v"(v));
#endif
}

// a * b + c, with one rounding where the machine has such an instruction.
EXL3_INLINE F multiply_add(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// Rounds to the nearest float16, ties to even, and stays in float32: Veltkamp's splitting with
// 2^13 + 1 keeps the upper 11 of 24 significant bits. Correct for the arguments that occur here,
// the unrounded codebook values, which have at most 20 significant bits and no float16 subnormal
// (a test compares all 65536 states).
EXL3_INLINE F round_to_half(F x) {
    const F big = x * 8193.0f;
    return big + (x - big);
}

}  // namespace
}  // namespace exl3
