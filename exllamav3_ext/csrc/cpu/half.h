// float16 <-> float32, scalar and exact (round to nearest even), for machines without F16C.

#pragma once

#include <bit>
#include <cstdint>

#include "format.h"

namespace exl3 {

EXL3_FN float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00)  // infinity, NaN
        return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
    // Shifting puts the exponent in place with the wrong bias; the product corrects it, and turns
    // subnormals into normals on the way.
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

EXL3_FN uint16_t float_to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded value in the low bits
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return uint16_t(sign | ((magnitude + 0xfff + odd - (112u << 23)) >> 13));
}

}  // namespace exl3
