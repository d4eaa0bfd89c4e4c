// Operator of the trellis search on the CPU: checks, output tensors, threads.

#include "common.h"
#include "cpu/viterbi.h"

namespace exl3 {
namespace {

std::tuple<Tensor, Tensor> quantize_tiles(const Tensor& tiles_in, int64_t bits, int64_t codebook) {
    check_dim(tiles_in, 2, "tiles");
    check_dtype(tiles_in, ScalarType::Float, "tiles");
    check_size(tiles_in, 1, kTileWeights, "tiles");
    STD_TORCH_CHECK(bits >= 1 && bits <= viterbi::kMaxBits, "bits must be 1 to 8, got ", bits);
    STD_TORCH_CHECK(codebook >= kInst3 && codebook <= kMul1, "codebook must be 0 to 2, got ",
                    codebook);
    const Tensor tiles = torch::stable::contiguous(tiles_in);
    Tensor values = empty({tiles.size(0), kTileWeights}, ScalarType::Float, tiles);
    Tensor states = empty({tiles.size(0), kTileWeights}, ScalarType::Short, tiles);
    const int64_t count = tiles.size(0);
    const viterbi::Job job{viterbi::active_kernels(),
                           static_cast<const float*>(tiles.const_data_ptr()),
                           static_cast<float*>(values.mutable_data_ptr()),
                           static_cast<int16_t*>(states.mutable_data_ptr()),
                           count,
                           int(bits),
                           int(codebook),
                           viterbi::group_count(count, torch::stable::get_num_threads())};
    torch::stable::parallel_for(
        0, job.units(), 1,
        [&](int64_t begin, int64_t end) { viterbi::search_units(job, begin, end); });
    return {values, states};
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CPU, m) {
    m.impl("quantize_tiles", TORCH_BOX(&exl3::quantize_tiles));
}
