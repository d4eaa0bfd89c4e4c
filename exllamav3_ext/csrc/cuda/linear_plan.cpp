// How a packed linear is cut into jobs, one for each thread block.

#include <algorithm>

#include "cuda/linear_params.h"
#include "format.h"

namespace exl3 {
namespace {

// Cuts are chosen as for a card of this many multiprocessors, whatever the card: then the order of
// every sum, and so every bit of the result, is the same everywhere.
constexpr int kNominalMultiprocessors = 132;
constexpr int kWarps = 8;

// A weight either fills the card or leaves an eighth of its slots (two thread blocks on each
// multiprocessor) to narrow ones in the same launch, such as k and v beside q. Narrow weights are
// cut into jobs as long as those of a wide one: alone they would be faster in more and shorter
// jobs, but beside it those would be a third thread block on some multiprocessors, for which all
// wait.
constexpr int kSlots = 2 * kNominalMultiprocessors;
constexpr int kNarrow = 8;  // column blocks
constexpr int kNarrowSlices = 9;

// What every card since sm_80 grants a thread block (99 KiB), less a little for static variables.
constexpr size_t kSharedBytes = 98 * 1024;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int tiles_of_warp(int row_class) { return row_class <= 16 ? 4 : 2; }

// With one or two rows, each of the 8 warps transforms one block of the input.
int max_slice_quads(int row_class) { return row_class == 2 ? 2 * (kWarps - 1) : kMaxSliceQuads; }

void apply(LinearMember& m, const LinearCut& cut, int quads, int row_class) {
    m.warps_across = cut.warps_across;
    m.slice_quads = cut.slice_quads;
    m.slices = ceil_div(quads, cut.slice_quads);
    m.blocks_across = ceil_div(8 * m.column_blocks, cut.warps_across * tiles_of_warp(row_class));
}

// Time of a cut in quads of one warp: two thread blocks share a multiprocessor; a job costs its
// quads, its start (input transform) and its end (sums, arrival); the last job of a column block
// reads what all slices wrote.
float time_of(const LinearMember& m, int quads, int rows, int row_groups) {
    const int jobs = m.blocks_across * m.slices * row_groups;
    const int length = ceil_div(std::min(m.slice_quads, quads), kWarps / m.warps_across);
    const int waves = ceil_div(jobs, kNominalMultiprocessors);
    const float start = (rows <= 2    ? 2.2f
                         : rows <= 8  ? 3.f
                         : rows <= 16 ? 4.f
                                      : 3.5f) +
                        0.005f * rows * m.slice_quads;
    const float share = float(m.warps_across) / kWarps;  // of the columns that a job can have
    const float end = m.slices == 1 ? 0.5f
                      : rows <= 2   ? 1.f + 0.01f * rows * m.slices
                                    : 1.f + 0.03f * rows * m.slices * share;
    // A thread block alone on its multiprocessor runs at two thirds of the speed of two together.
    const float rounds = waves + (waves % 2 ? 0.5f : 0.f);
    // Jobs of other members may run beside these: work counts, not only the time until the end.
    const float work = float(jobs) / kNominalMultiprocessors * (length + start);
    return rounds * (length + start) + end + work;
}

}  // namespace

LinearPlan plan_linear(LinearParams& p, const LinearCut* cut) {
    LinearPlan plan{};
    plan.row_class = p.rows <= 2 ? 2 : p.rows <= 8 ? 8 : p.rows <= 16 ? 16 : 32;
    p.row_groups = ceil_div(p.rows, plan.row_class);
    const int rows = std::min(p.rows, plan.row_class), quads = 2 * p.k_blocks;
    const int one_block = 8 / tiles_of_warp(plan.row_class);  // warps across 128 columns

    for (int i = 0; i < p.members; ++i) {
        LinearMember& m = p.member[i];
        LinearCut best{};
        float best_time = 0;
        for (int across = one_block; across <= kWarps; across *= 2) {
            for (int length = 1; length <= std::min(quads, max_slice_quads(plan.row_class));
                 ++length) {
                if (ceil_div(quads, length) == ceil_div(quads, length - 1 ? length - 1 : 1) &&
                    length > 1)
                    continue;  // no fewer slices than a shorter length gives
                apply(m, {across, length}, quads, plan.row_class);
                if (linear_shared_bytes(plan.row_class, m) > kSharedBytes) break;
                const int jobs = m.blocks_across * m.slices * p.row_groups;
                if (jobs > kSlots * 7 / 8 && jobs < kSlots * 15 / 16) continue;
                const float time = time_of(m, quads, rows, p.row_groups);
                if (best_time == 0 || time < best_time) best = {across, length}, best_time = time;
            }
        }
        if (m.column_blocks <= kNarrow && plan.row_class <= 16 && quads >= kNarrowSlices) {
            best = {kWarps,
                    std::min(ceil_div(quads, kNarrowSlices), max_slice_quads(plan.row_class))};
            apply(m, best, quads, plan.row_class);
            while (linear_shared_bytes(plan.row_class, m) > kSharedBytes)
                apply(m, {kWarps, --best.slice_quads}, quads, plan.row_class);
        }
        if (cut) best = *cut;
        apply(m, best, quads, plan.row_class);
        m.first_block = plan.grid;
        m.first_partial = plan.partial_floats;
        m.first_counter = plan.counters;
        plan.grid += m.blocks_across * m.slices * p.row_groups;
        if (m.slices > 1) {
            // Whole jobs, or whole column blocks where the last job is cut off.
            const int columns =
                std::max(kBlock * m.column_blocks,
                         m.blocks_across * m.warps_across * tiles_of_warp(plan.row_class) * kTile);
            plan.partial_floats += int64_t(p.row_groups) * columns * plan.row_class * m.slices;
            plan.counters += p.row_groups * m.column_blocks;
        }
    }
    return plan;
}

}  // namespace exl3
