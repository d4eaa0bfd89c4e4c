// Tail-biting trellis search on the CPU: shapes, tables and the interface between its parts.
//
//   viterbi.cpp                         the search over one group of tiles: passes, trace, closing
//   viterbi_tables.cpp                  codebook levels in the order in which the steps read them
//   viterbi_step.h                      the two inner loops, for any vector type
//   viterbi_{avx512,avx2,portable}.cpp  vector types; each file compiles the loops for one
//   bind_search.cpp                     the operator: checks, outputs, threads
//
// exllamav3/ops/reference/search.py specifies the result, bit for bit.
//
// Vocabulary. K bits per weight; a *state* is 16 bits; a *node* is the 16 - K bits that consecutive
// states share; *fan* = 2^K states enter and leave each node. State s = c << (16 - K) | out leads
// from node s >> K = c << (16 - 2 K) | out >> K to node `out`; c = 0 .. fan - 1 is its *choice*.

#pragma once

#include <cstdint>

#include "format.h"

namespace exl3::viterbi {

inline constexpr int kRing = kTileWeights;
inline constexpr int kGroup = 4;  // tiles that share each load of the codebook
inline constexpr int kStates = 1 << 16;
inline constexpr int kMaxBits = 8;
inline constexpr int kMaxRounds = 5;
inline constexpr float kWeightLimit = 64.0f;

// Positions searched before the ring, so that its first position has a past. Even numbers.
EXL3_FN int warm_up(int bits) { return bits <= 5 ? 96 : bits == 6 ? 64 : 48; }

// Costs of all nodes are kept only every `stride` positions (a *mark*); on the way back the costs
// in between are computed again, along the fan^stride walks that can matter. With it no rate keeps
// more than 4 MiB of costs per tile.
EXL3_FN int mark_stride(int bits) {
    return bits == 1 ? 8 : bits == 2 ? 4 : bits == 3 ? 2 : 1;
}

// Values and weights are multiples of 1 / scale: the mean cost of a weight is then 2^14 at every
// rate, and the costs of all but absurd walks are integers below 2^24, exact in float32.
EXL3_FN float scale(int bits) { return float(1 << (7 + bits)); }

// A vector of costs: the nodes of one choice (as in-nodes) are contiguous, and 16 floats of padding
// after each choice keep the fan's parallel streams out of each other's cache sets.
EXL3_FN int nodes(int bits) { return 1 << (16 - bits); }
EXL3_FN int nodes_of_choice(int bits) { return 1 << (16 - 2 * bits); }
EXL3_FN int padding(int bits) { return bits <= 5 ? 16 : 0; }
EXL3_FN int choice_stride(int bits) { return nodes_of_choice(bits) + padding(bits); }
EXL3_FN int cost_size(int bits) { return choice_stride(bits) << bits; }
EXL3_FN int cost_index(int bits, int node) {
    return node + (node >> (16 - 2 * bits)) * padding(bits);
}

// Order of the levels of one step, chosen by the vector width: [block][choice][vector][lane]. The
// out-nodes of a block are
//   fan >= lanes: neighbours, `vectors * lanes` of them, which share one in-node for each choice;
//   fan <  lanes: out-node `block % fan` of `lanes` neighbouring in-nodes.
struct Layout {
    int lanes;
    int max_vectors;

    EXL3_FN int vectors(int bits) const {
        return (1 << bits) < max_vectors * lanes ? 1 : max_vectors;
    }
    EXL3_FN int out_node(int bits, int block, int vector, int lane) const {
        const int fan = 1 << bits;
        if (fan < lanes) return (block / fan * lanes + lane) << bits | block % fan;
        return (block * vectors(bits) + vector) * lanes + lane;
    }
};

// Costs of all nodes after one more position, for 1 or kGroup tiles.
//   levels: of all states, in Layout order; weights, in, out: one per tile.
using StepFn = void (*)(const float* levels, const float* weights, const float* const* in,
                        float* const* out);

// Cheapest choice into one node; of equal ones the smallest. Returns its cost.
//   levels: of the states into that node, by choice; costs: of its in-nodes, `stride` apart.
using BackFn = float (*)(const float* levels, const float* costs, int64_t stride, int fan,
                         float weight, int* choice);

// The inner loops compiled for one instruction set.
struct Kernels {
    Layout layout;
    StepFn step_one[kMaxBits + 1];    // by K; one tile
    StepFn step_group[kMaxBits + 1];  // kGroup tiles
    BackFn back;
};

const Kernels& portable_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& active_kernels();  // by active_isa(), and throws what that throws

// Scaled and rounded codebook in the orders of the two loops, built once and kept.
struct Tables {
    const float* forward;  // [kStates] in Layout order
    const float* back;     // [node][choice]
};

const Tables& tables(const Layout& layout, int bits, int codebook);

// The float16 value of a state, as float32.
float codebook_value(uint32_t state, int codebook);

// What to search, and how it is cut in units of work: groups of kGroup tiles and then single ones,
// or single tiles only, where there are too few groups for the threads. A tile's result is the same
// either way, so any partition of the units over threads gives the same tensors.
struct Job {
    const Kernels& kernels;
    const float* tiles;  // [count][256], ring order
    float* values;       // [count][256]
    int16_t* states;     // [count][256]
    int64_t count;
    int bits;
    int codebook;
    int64_t groups;  // from group_count()

    int64_t units() const { return groups + (count - groups * kGroup); }
};

int64_t group_count(int64_t tiles, int64_t threads);
void search_units(const Job& job, int64_t begin, int64_t end);

}  // namespace exl3::viterbi
