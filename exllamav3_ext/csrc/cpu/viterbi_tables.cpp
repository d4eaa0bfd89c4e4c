// Codebook levels of the trellis search, in the orders in which its two loops read them.

#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <tuple>

#include "cpu/half.h"
#include "cpu/viterbi.h"

namespace exl3::viterbi {
namespace {

struct Free {
    void operator()(float* memory) const { std::free(memory); }
};
using Levels = std::unique_ptr<float[], Free>;

Levels allocate_levels() {
    void* memory = std::aligned_alloc(64, kStates * sizeof(float));
    if (memory == nullptr) throw std::bad_alloc();
    return Levels(static_cast<float*>(memory));
}

struct OwnedTables {
    Levels forward = allocate_levels();
    Levels back = allocate_levels();
    Tables view{forward.get(), back.get()};
};

OwnedTables build(const Layout& layout, int bits, int codebook) {
    const int fan = 1 << bits, shift = 16 - bits;
    const auto level = [&](int choice, int out_node) {
        const uint32_t state = uint32_t(choice << shift | out_node);
        return std::nearbyint(codebook_value(state, codebook) * scale(bits));
    };
    OwnedTables result;
    float* next = result.forward.get();
    for (int block = 0; next < result.forward.get() + kStates; ++block)
        for (int c = 0; c < fan; ++c)
            for (int vector = 0; vector < layout.vectors(bits); ++vector)
                for (int lane = 0; lane < layout.lanes; ++lane)
                    *next++ = level(c, layout.out_node(bits, block, vector, lane));
    next = result.back.get();
    for (int node = 0; node < nodes(bits); ++node)
        for (int c = 0; c < fan; ++c) *next++ = level(c, node);
    return result;
}

}  // namespace

float codebook_value(uint32_t state, int codebook) {
    const uint32_t hash = hash_state(state, codebook);
    float value;  // exact in float32; what follows is the one rounding
    if (codebook == kMul1) {
        value = float(1024 + byte_sum(hash)) * kMul1Scale + kMul1Offset;
    } else {
        const uint32_t halves = halves_of(hash);
        value = half_to_float(uint16_t(halves)) + half_to_float(uint16_t(halves >> 16));
    }
    return half_to_float(float_to_half(value));
}

// 512 KiB for each rate and codebook in use, kept for the life of the process.
const Tables& tables(const Layout& layout, int bits, int codebook) {
    static std::mutex mutex;
    static std::map<std::tuple<int, int, int>, OwnedTables> built;
    const std::lock_guard lock(mutex);
    const auto key = std::make_tuple(layout.lanes, bits, codebook);
    auto found = built.find(key);
    if (found == built.end()) found = built.emplace(key, build(layout, bits, codebook)).first;
    return found->second.view;
}

}  // namespace exl3::viterbi
