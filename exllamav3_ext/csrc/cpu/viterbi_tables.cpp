// Codebook levels of the trellis search, in the orders in which its two loops read them.

#include <bit>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <tuple>

#include "cpu/viterbi.h"

namespace exl3::viterbi {
namespace {

// Nearest float16 (ties to even) of a value in its normal range, or one that it holds exactly.
float round_to_half(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    bits += 0xfff + ((bits >> 13) & 1);
    return std::bit_cast<float>(bits & ~0x1fffu);
}

// float16 of normal range, which both halves of a codebook hash are.
float half_value(uint32_t half) {
    return std::bit_cast<float>(((half & 0x8000) << 16) | (((half & 0x7fff) << 13) + (112u << 23)));
}

float* allocate_levels() {
    void* memory = std::aligned_alloc(64, kStates * sizeof(float));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<float*>(memory);
}

Tables build(const Layout& layout, int bits, int codebook) {
    const int fan = 1 << bits, shift = 16 - bits;
    const auto level = [&](int choice, int out_node) {
        const uint32_t state = uint32_t(choice << shift | out_node);
        return std::nearbyint(codebook_value(state, codebook) * scale(bits));
    };
    const Tables result{allocate_levels(), allocate_levels()};
    float* next = result.forward;
    for (int block = 0; next < result.forward + kStates; ++block)
        for (int c = 0; c < fan; ++c)
            for (int vector = 0; vector < layout.vectors(bits); ++vector)
                for (int lane = 0; lane < layout.lanes; ++lane)
                    *next++ = level(c, layout.out_node(bits, block, vector, lane));
    next = result.back;
    for (int node = 0; node < nodes(bits); ++node)
        for (int c = 0; c < fan; ++c) *next++ = level(c, node);
    return result;
}

}  // namespace

float codebook_value(uint32_t state, int codebook) {
    const uint32_t hash = hash_state(state, codebook);
    if (codebook == kMul1)  // exact in float32 up to the one rounding
        return round_to_half(float(1024 + byte_sum(hash)) * kMul1Scale + kMul1Offset);
    const uint32_t halves = halves_of(hash);
    return round_to_half(half_value(halves & 0xffff) + half_value(halves >> 16));
}

// 512 KiB for each rate and codebook in use, kept for the life of the process.
const Tables& tables(const Layout& layout, int bits, int codebook) {
    static std::mutex mutex;
    static std::map<std::tuple<int, int, int>, Tables> built;
    const std::lock_guard lock(mutex);
    const auto key = std::make_tuple(layout.lanes, bits, codebook);
    auto found = built.find(key);
    if (found == built.end()) found = built.emplace(key, build(layout, bits, codebook)).first;
    return found->second;
}

}  // namespace exl3::viterbi
