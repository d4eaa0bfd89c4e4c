// What one launch of the packed linear is told. Plain data, passed by value; no torch.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace exl3 {

inline constexpr int kMaxMembers = 8;

enum class Float : int { kHalf = 0, kFloat = 1, kBFloat16 = 2 };

struct LinearMember {
    // Given by the caller.
    const void* trellis;  // 16-byte aligned; tiles of a tile row follow each other
    int64_t row_bytes;    // from one tile row to the next, a multiple of 16
    const void* suh;      // float16 [k]
    const void* svh;      // float16 [n]
    const void* bias;     // [n] or null
    void* out;            // [rows, n]
    int column_blocks;    // n / 128
    int half_bits;
    int codebook;
    Float bias_type;
    // Filled in by plan_linear.
    int across_bits;  // 2^this of the 8 warps of a thread block are side by side; the others divide
                      // the slice
    int slice_quads;  // length of a k-slice in quads of 64 input channels
    int slices;
    int together;           // of the slices, which divides them: these are added first
    int blocks_across;      // thread blocks side by side
    int first_block;        // of the grid
    int64_t first_partial;  // offset in `partials`, in float
    int first_counter;      // offset in `counters`
};

struct LinearParams {
    const void* x;  // [rows, k]
    float* partials;
    int* counters;
    int rows;
    int k_blocks;    // k / 128
    int row_groups;  // rows are taken `row class` at a time
    int cluster;     // thread blocks in a cluster: 1, or `together` of every member
    bool has_clusters;
    int members;
    Float x_type;
    Float out_type;
    LinearMember member[kMaxMembers];
};

struct LinearPlan {
    int row_class;  // 2, 8, 16 or 32 rows are multiplied at a time
    int grid;
    int64_t partial_floats;
    int counters;
};

// Longest slice, in quads: bounded by shared memory and by exact int32 sums (linear_kernel.cuh).
inline constexpr int kMaxSliceQuads = 32;

// Slices that a cluster can add, which every card with clusters grants.
inline constexpr int kMaxTogether = 8;

// How one member is cut. Depends on the shape of the weight and the rows alone.
struct LinearCut {
    int across_bits, slice_quads, together;
};

// Fills the planning fields of `params` and says what to launch. `has_clusters`: the card's blocks
// come in clusters and its kernels may overlap; the results are the same with and without. `cuts`,
// for measurements, overrides the choice for each member.
LinearPlan plan_linear(LinearParams& params, bool has_clusters, const LinearCut* cuts = nullptr);

// Whether this device has thread block clusters and dependent launches.
bool has_clusters(int device);

// Launches on `stream` of the current device; the workspace pointers must be set.
cudaError_t launch_linear(const LinearParams& params, const LinearPlan& plan, cudaStream_t stream);

// Dynamic shared memory of a thread block in a cluster of that size, once the member has been cut.
size_t linear_shared_bytes(int row_class, const LinearMember& member, int cluster);

}  // namespace exl3
