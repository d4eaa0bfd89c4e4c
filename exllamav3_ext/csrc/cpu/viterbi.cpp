// The trellis search over tiles: warm-up, the pass around the ring, trace back, closing.
//
// Problem: 65536 candidates for each of 256 + 96 positions of a tile, 1.5 cycles for 16 of them
// with AVX-512, together 2.2 million cycles. That is the bound from K = 4 on. Below, cost vectors
// of 32 to 128 KiB for each of 4 tiles, read and written at every position, make the second cache
// the bound (2 to 3 cycles).
//
// Memory of a thread, reused from call to call: for each of the 4 tiles of a group two cost vectors
// and one at every mark; 17 to 18 MiB up to K = 4, then 10, 4, 2 and 1.

#include "cpu/viterbi.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "cpu/dispatch.h"

namespace exl3::viterbi {
namespace {

// Grows to the largest request of its thread and is then reused: no allocation, no zeroing and no
// page faults in later calls. Huge pages, because the steps walk fan x tiles streams at once.
class Scratch {
   public:
    float* reserve(size_t floats) {
        constexpr size_t page = size_t(2) << 20;
        const size_t bytes = (floats * sizeof(float) + page - 1) / page * page;
        if (bytes > size_) {
            std::free(memory_);
            size_ = 0;
            memory_ = std::aligned_alloc(page, bytes);
            if (memory_ == nullptr) throw std::bad_alloc();
            size_ = bytes;
#if defined(MADV_HUGEPAGE)
            madvise(memory_, bytes, MADV_HUGEPAGE);  // only a hint
#endif
        }
        return static_cast<float*>(memory_);
    }
    ~Scratch() { std::free(memory_); }

   private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

// Search over up to kGroup tiles at once.
class Group {
   public:
    explicit Group(const Job& job)
        : bits_(job.bits),
          stride_(mark_stride(job.bits)),
          size_(cost_size(job.bits)),
          kernels_(job.kernels),
          tables_(tables(job.kernels.layout, job.bits, job.codebook)) {
        thread_local Scratch scratch;
        memory_ = scratch.reserve(size_t(kGroup) * vectors_per_tile() * size_);
    }

    // Scales and rounds the weights of `count` tiles (1 or kGroup; the last may repeat).
    void load(const float* const* tiles, int count) {
        count_ = count;
        for (int i = 0; i < count; ++i)
            for (int t = 0; t < kRing; ++t) {
                const float w = std::isnan(tiles[i][t]) ? 0.0f : tiles[i][t];
                const float limited = std::clamp(w, -kWeightLimit, kWeightLimit);
                weights_[t][i] = std::nearbyint(limited * scale(bits_));
            }
    }

    // First search: free start, warm-up, ring. After it, trace() any tile.
    void run_free() {
        float *from[kGroup], *to[kGroup];
        for (int i = 0; i < count_; ++i) {
            from[i] = spare(i, 1);  // the first step writes the other one: warm_up is even
            std::fill_n(from[i], size_, 0.0f);
        }
        for (int j = warm_up(bits_); j > 0; --j) {
            for (int i = 0; i < count_; ++i) to[i] = j == 1 ? mark(i, 0) : spare(i, j & 1);
            advance(kRing - j, from, to);
        }
        run_ring();
    }

    // Second search: tile i starts at nodes[i] and nowhere else.
    void run_from(const int* start_nodes) {
        for (int i = 0; i < count_; ++i) {
            std::fill_n(mark(i, 0), size_, std::numeric_limits<float>::infinity());
            mark(i, 0)[cost_index(bits_, start_nodes[i])] = 0.0f;
        }
        run_ring();
    }

    // Cheapest node after the last position; the first of equal ones.
    int cheapest_end(int i) const {
        const float* costs = mark(i, kRing / stride_);
        int best = 0;
        for (int node = 1; node < nodes(bits_); ++node)
            if (costs[cost_index(bits_, node)] < costs[cost_index(bits_, best)]) best = node;
        return best;
    }

    // States of the cheapest walk of tile i to `node` after the last position; returns the node
    // where it entered the ring. If `states` holds an earlier walk of the tile (`again`), the trace
    // stops where it meets that one: from there on they are the same.
    int trace(int i, int node, uint16_t* states, bool again) const {
        for (int t = kRing - stride_; t >= 0; t -= stride_) {
            const int before = states[t] >> bits_;
            node = stride_ == 1 ? trace_one(i, t, node, states)
                                : trace_between_marks(i, t, node, states);
            if (again && node == before) return states[0] >> bits_;
        }
        return node;
    }

   private:
    int vectors_per_tile() const { return kRing / stride_ + 1 + 2; }
    float* vector(int i, int j) const {
        return memory_ + (size_t(i) * vectors_per_tile() + j) * size_;
    }
    float* mark(int i, int j) const { return vector(i, j); }  // costs before position j * stride
    float* spare(int i, int j) const { return vector(i, kRing / stride_ + 1 + j); }

    void advance(int t, float** from, float* const* to) const {
        const StepFn step = count_ == 1 ? kernels_.step_one[bits_] : kernels_.step_group[bits_];
        step(tables_.forward, weights_[t], from, to);
        std::copy_n(to, count_, from);
    }

    void run_ring() {
        float *from[kGroup], *to[kGroup];
        for (int i = 0; i < count_; ++i) from[i] = mark(i, 0);
        for (int t = 0; t < kRing; ++t) {
            const int after = t + 1;
            for (int i = 0; i < count_; ++i)
                to[i] = after % stride_ == 0 ? mark(i, after / stride_) : spare(i, t & 1);
            advance(t, from, to);
        }
    }

    int trace_one(int i, int t, int node, uint16_t* states) const {
        int choice;
        kernels_.back(tables_.back + (size_t(node) << bits_), mark(i, t) + (node >> bits_),
                      choice_stride(bits_), 1 << bits_, weights_[t][i], &choice);
        const int state = choice << (16 - bits_) | node;
        states[t] = uint16_t(state);
        return state >> bits_;
    }

    // The walks of `stride` positions into `last` start at fan^stride nodes. Level j of the tree
    // has the nodes from which j choices remain; entry e of it, whose digits in base fan are those
    // choices with the earliest on top, is the node e << (16 - K - j K) | last >> j K.
    int trace_between_marks(int i, int t, int last, uint16_t* states) const {
        constexpr int kLeaves = 256;  // fan^stride at most
        float costs[kLeaves];
        uint8_t choices[kLeaves];  // entries of level j at fan^j, which never overlap
        const int fan = 1 << bits_;
        const auto node = [&](int j, int e) {
            return e << (16 - bits_ - j * bits_) | last >> j * bits_;
        };
        for (int e = 0; e < 1 << (stride_ * bits_); ++e)
            costs[e] = mark(i, t / stride_)[cost_index(bits_, node(stride_, e))];
        for (int j = stride_ - 1; j >= 0; --j) {
            const int count = 1 << (j * bits_);
            for (int e = 0; e < count; ++e) {
                int choice;
                const float* levels = tables_.back + (size_t(node(j, e)) << bits_);
                costs[e] = kernels_.back(levels, costs + e, count, fan,
                                         weights_[t + stride_ - 1 - j][i], &choice);
                choices[count + e] = uint8_t(choice);
            }
        }
        int e = 0;
        for (int j = 0; j < stride_; ++j) {  // from the last position back
            const int state = choices[(1 << (j * bits_)) + e] << (16 - bits_) | node(j, e);
            states[t + stride_ - 1 - j] = uint16_t(state);
            e |= choices[(1 << (j * bits_)) + e] << (j * bits_);
        }
        return node(stride_, e);
    }

    const int bits_, stride_, size_;
    const Kernels& kernels_;
    const Tables& tables_;
    float* memory_;
    int count_ = 0;
    float weights_[kRing][kGroup];
};

struct Open {  // a tile that is not closed after kMaxRounds, and the last node seen at its seam
    int64_t tile;
    int node;
};

void store(const Job& job, int64_t tile, const uint16_t* states) {
    for (int t = 0; t < kRing; ++t) {
        job.states[tile * kRing + t] = int16_t(states[t]);
        job.values[tile * kRing + t] = codebook_value(states[t], job.codebook);
    }
}

// First search of `count` tiles from `first` on; what stays open is appended to `open`.
void search(const Job& job, Group& group, int64_t first, int count, std::vector<Open>& open) {
    const float* tiles[kGroup];
    for (int i = 0; i < count; ++i) tiles[i] = job.tiles + (first + i) * kRing;
    group.load(tiles, count);
    group.run_free();
    for (int i = 0; i < count; ++i) {
        uint16_t states[kRing] = {};
        int node = group.cheapest_end(i);
        int root = group.trace(i, node, states, false);
        for (int round = 1; round < kMaxRounds && root != node; ++round) {
            node = root;
            root = group.trace(i, node, states, true);
        }
        if (root == node)
            store(job, first + i, states);
        else
            open.push_back({first + i, root});
    }
}

// Second search of up to kGroup open tiles: through a given node, hence closed.
void close(const Job& job, Group& group, const Open* open, int count) {
    const float* tiles[kGroup];
    int start_nodes[kGroup];
    const int used = count == 1 ? 1 : kGroup;
    for (int i = 0; i < used; ++i) {
        const Open& entry = open[std::min(i, count - 1)];
        tiles[i] = job.tiles + entry.tile * kRing;
        start_nodes[i] = entry.node;
    }
    group.load(tiles, used);
    group.run_from(start_nodes);
    for (int i = 0; i < count; ++i) {
        uint16_t states[kRing] = {};
        group.trace(i, start_nodes[i], states, false);
        store(job, open[i].tile, states);
    }
}

}  // namespace

const Kernels& active_kernels() {
#if defined(__x86_64__)
    const Isa isa = active_isa();
    if (isa == Isa::avx512) return avx512_kernels();
    if (isa == Isa::avx2) return avx2_kernels();
#endif
    return portable_kernels();
}

int64_t group_count(int64_t tiles, int64_t threads) {
    // A tile on its own takes 1.5 times its share of a group: loading the levels bounds it.
    constexpr double kSingle = 1.5;
    const auto share = [&](int64_t units) { return (units + threads - 1) / threads; };
    const int64_t groups = tiles / kGroup, units = share(groups + tiles % kGroup);
    const int64_t slowest = std::min(groups, units);  // groups of the busiest thread
    const double grouped = double(kGroup * slowest) + kSingle * double(units - slowest);
    return grouped <= kSingle * double(share(tiles)) ? groups : 0;
}

void search_units(const Job& job, int64_t begin, int64_t end) {
    Group group(job);
    std::vector<Open> open;
    for (int64_t unit = begin; unit < end; ++unit) {
        if (unit < job.groups)
            search(job, group, unit * kGroup, kGroup, open);
        else
            search(job, group, job.groups * kGroup + (unit - job.groups), 1, open);
    }
    for (size_t i = 0, count; i < open.size(); i += count) {
        const size_t left = open.size() - i;
        count = left < kGroup - 1 ? 1 : std::min<size_t>(left, kGroup);
        close(job, group, &open[i], int(count));
    }
}

}  // namespace exl3::viterbi
