// Operator `quantize_tiles` on a CUDA device: checks, outputs, workspace, chunks.

#include <algorithm>

#include "../format.h"
#include "stream.h"
#include "viterbi.h"

namespace exl3 {
namespace {

// The history of the search is what needs memory: 1.05 MB a tile at K=4, 2.1 at K=2 and 3. More
// tiles than fit are searched in several launches. It comes from torch's caching allocator, so that
// it is reused, and captured graphs own theirs.
constexpr int64_t kWorkspaceLimit = int64_t(2400) << 20;

int sm_count(int device) {
    int sms = 0;
    EXL3_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    return sms;
}

std::tuple<Tensor, Tensor> quantize_tiles(const Tensor& tiles_in, int64_t bits, int64_t codebook) {
    check_dim(tiles_in, 2, "tiles");
    check_size(tiles_in, 1, kTileWeights, "tiles");
    check_dtype(tiles_in, ScalarType::Float, "tiles");
    STD_TORCH_CHECK(bits >= 1 && bits <= 8, "bits must be 1..8, got ", bits);
    STD_TORCH_CHECK(codebook >= 0 && codebook <= 2, "codebook must be 0, 1 or 2, got ", codebook);

    const CudaScope scope(tiles_in);
    const Tensor tiles = torch::stable::contiguous(tiles_in);
    const int64_t count = tiles.size(0);
    Tensor values = empty({count, kTileWeights}, ScalarType::Float, tiles);
    Tensor states = empty({count, kTileWeights}, ScalarType::Short, tiles);
    if (count == 0) return {values, states};

    const int64_t chunk = std::min(
        count, search::tiles_that_fit(int(bits), kWorkspaceLimit, sm_count(scope.device)));
    Tensor workspace =
        empty({search::workspace_bytes(int(bits), chunk)}, ScalarType::Byte, tiles);
    for (int64_t first = 0; first < count; first += chunk) {
        const int64_t offset = first * kTileWeights;
        search::Job job{};
        job.tiles = static_cast<const float*>(tiles.const_data_ptr()) + offset;
        job.values = static_cast<float*>(values.mutable_data_ptr()) + offset;
        job.states = static_cast<int16_t*>(states.mutable_data_ptr()) + offset;
        job.count = int(std::min(chunk, count - first));
        job.codebook = int(codebook);
        job.workspace = workspace.mutable_data_ptr();
        EXL3_CUDA_CHECK(search::quantize_tiles(int(bits), job, scope.stream));
    }
    return {values, states};
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CUDA, m) {
    m.impl("quantize_tiles", TORCH_BOX(&exl3::quantize_tiles));
}
