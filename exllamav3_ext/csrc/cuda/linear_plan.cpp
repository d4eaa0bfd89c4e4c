// How a packed linear is cut into jobs, one for each thread block.

#include <algorithm>

#include "cuda/linear_params.h"
#include "format.h"

namespace exl3 {
namespace {

// Cuts are chosen as for a card of this many multiprocessors, whatever the card: then the order of
// every sum, and so every bit of the result, does not depend on it.
constexpr int kMultiprocessors = 132;
constexpr int kWarps = 8, kAcrossBits = 3;  // all warps side by side

// Clusters of 8 that such a card surely takes at once, two thread blocks on a multiprocessor: 30
// were found, but how multiprocessors are grouped differs from one to the next.
constexpr int kClusterBlocks = 28 * kMaxTogether;

// What every card since sm_80 grants a thread block (99 KiB), less a little for static variables.
constexpr size_t kSharedBytes = 98 * 1024;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int tiles_of_warp(int row_class) { return row_class <= 16 ? 4 : 2; }

// With one or two rows, each of the 8 warps transforms one block of the input.
int max_slice_quads(int row_class) { return row_class == 2 ? 2 * kWarps : kMaxSliceQuads; }

// Sums of one job, whole column blocks.
int part_floats(int row_class, const LinearMember& m) {
    const int tiles = tiles_of_warp(row_class) * (row_class == 2 ? kWarps : 1 << m.across_bits);
    return row_class * tiles * kTile;
}

void apply(LinearMember& m, const LinearCut& cut, int quads, int row_class) {
    m.across_bits = cut.across_bits;
    m.slice_quads = cut.slice_quads;
    m.slices = ceil_div(quads, cut.slice_quads);
    m.together = cut.together;
    m.blocks_across = ceil_div(8 * m.column_blocks, tiles_of_warp(row_class) << cut.across_bits);
}

int most_together(int slices) {
    int together = std::min(slices, kMaxTogether);
    while (slices % together != 0) --together;
    return together;
}

bool fits(const LinearMember& m, int row_class) {
    return m.slice_quads <= max_slice_quads(row_class) &&
           linear_shared_bytes(row_class, m, 1) <= kSharedBytes;
}

// Time of a cut in quads of one warp. Two thread blocks on a multiprocessor take twice as long as
// one; each costs its quads and its start. Sums that meet in global memory wait for an arrival and
// for what one block reads.
float time_of(const LinearMember& m, int jobs, int row_class) {
    const int parts = m.slices / m.together;
    const float start = row_class == 2 ? 2 : 3;
    const float rounds = jobs <= kMultiprocessors       ? 1.15f  // alone, not quite twice as fast
                         : jobs <= 8 * kMultiprocessors ? float(ceil_div(jobs, kMultiprocessors))
                                                        : float(jobs) / kMultiprocessors + 0.5f;
    const float end = parts > 1 ? 2.6f + 0.04f * row_class * parts / m.together : 0;
    return rounds * (m.slice_quads + start) + end;
}

// Depends on the shape of the weight and the number of rows alone.
//
// The rule: slices are as many as a cluster adds, or twice as many and so on, whatever the width.
// So q, k and v are cut alike, into jobs of one length, and run in one launch as if they were one
// weight; narrow ones alone would be faster in more and shorter jobs, but those would be a third
// thread block on some multiprocessors beside a wide one, for which all wait. Exceptions: weights
// too wide for all clusters to run at once, and those wider than a k or v but narrower than their
// input, which are no part of a group.
LinearCut best_cut(LinearMember m, int k_blocks, int row_class, int row_groups) {
    const int quads = 2 * k_blocks;
    auto jobs = [&] { return m.blocks_across * m.slices * row_groups; };
    for (int parts = 1; parts <= quads; ++parts) {
        const int length = ceil_div(quads, kMaxTogether * parts);
        apply(m, {kAcrossBits, length, 1}, quads, row_class);
        const int together = most_together(m.slices);
        if (!fits(m, row_class) || (m.slices > 4 && together < 4)) continue;
        const bool is_alone = m.column_blocks > 16 && m.column_blocks < k_blocks;
        if (jobs() <= kClusterBlocks && !is_alone) return {kAcrossBits, length, together};
        break;
    }
    LinearCut best{kAcrossBits, 1, 1};
    float best_time = 0;
    for (int length = 1; length <= quads; ++length) {
        if (length > 1 && ceil_div(quads, length) == ceil_div(quads, length - 1))
            continue;  // no fewer slices than a shorter length gives
        apply(m, {kAcrossBits, length, 1}, quads, row_class);
        if (!fits(m, row_class)) break;
        if (jobs() <= kClusterBlocks) m.together = most_together(m.slices);
        const float time = time_of(m, jobs(), row_class);
        if (best_time == 0 || time < best_time)
            best = {kAcrossBits, length, m.together}, best_time = time;
    }
    return best;
}

// Clusters come all at once or in many waves; a second wave of a few would be as long as the first.
// Without clusters the slices meet in global memory, in the same order.
int cluster_of(const LinearParams& p) {
    int jobs = 0;
    for (int i = 0; i < p.members; ++i) {
        const LinearMember& m = p.member[i];
        if (m.together != p.member[0].together) return 1;
        jobs += m.blocks_across * m.slices * p.row_groups;
    }
    const bool fit = jobs <= kClusterBlocks || jobs > 2 * kClusterBlocks;
    return p.has_clusters && fit ? p.member[0].together : 1;
}

}  // namespace

LinearPlan plan_linear(LinearParams& p, bool has_clusters, const LinearCut* cuts) {
    LinearPlan plan{};
    plan.row_class = p.rows <= 2 ? 2 : p.rows <= 8 ? 8 : p.rows <= 16 ? 16 : 32;
    p.row_groups = ceil_div(p.rows, plan.row_class);
    p.has_clusters = has_clusters;
    for (int i = 0; i < p.members; ++i) {
        LinearMember& m = p.member[i];
        const LinearCut cut =
            cuts ? cuts[i] : best_cut(m, p.k_blocks, plan.row_class, p.row_groups);
        apply(m, cut, 2 * p.k_blocks, plan.row_class);
    }
    p.cluster = cluster_of(p);
    for (int i = 0; i < p.members; ++i) {
        LinearMember& m = p.member[i];
        m.first_block = plan.grid;
        m.first_partial = plan.partial_floats;
        m.first_counter = plan.counters;
        const int groups = m.blocks_across * p.row_groups, parts = m.slices / p.cluster;
        plan.grid += groups * m.slices;
        if (parts > 1) {
            plan.partial_floats += int64_t(groups) * parts * part_floats(plan.row_class, m);
            plan.counters += groups * p.cluster;
        }
    }
    return plan;
}

}  // namespace exl3
