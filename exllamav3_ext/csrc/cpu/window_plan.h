// Where the 16-bit windows of a tile lie, worked out at compile time for every rate.
//
// A group is `Lanes` consecutive ring positions. It begins at ring bit Lanes * K * group, and one
// unaligned load from word `base(group)` brings all the ring bits that its windows touch. Window
// i then lies in two neighbouring 16-bit halves: high half `halves[i] - 1`, low half `halves[i]`
// in ring order, counted from the load, to be shifted right by `shifts[i]`. In memory the two
// halves of a word are swapped (format.h), so ring half h is element h ^ 1. Offsets repeat every
// `kPhases` groups.

#pragma once

#include <numeric>

#include "format.h"
#include "cpu/simd.h"

namespace exl3 {
namespace {

template <int HalfBits, int Lanes>
struct WindowPlan {
    static constexpr int kGroups = kTileWeights / Lanes;
    static constexpr int kGroupBits = Lanes * HalfBits / 2;
    static constexpr int kPhases = 32 / std::gcd(kGroupBits, 32);
    static constexpr int kWords = tile_words(HalfBits);

    // First word of the load of a group; -1 for group 0, whose windows wrap around the ring.
    static constexpr int base(int group) { return (kGroupBits * group + 16) / 32 - 1; }

    int halves[kPhases][Lanes];
    int shifts[kPhases][Lanes];

    constexpr WindowPlan() : halves{}, shifts{} {
        for (int phase = 0; phase < kPhases; ++phase)
            for (int i = 0; i < Lanes; ++i) {
                const int end = window_end(HalfBits, phase * Lanes + i) - 32 * base(phase);
                halves[phase][i] = (end - 1) / 16;
                shifts[phase][i] = 16 * (halves[phase][i] + 1) - end;
            }
    }
};

}  // namespace
}  // namespace exl3
