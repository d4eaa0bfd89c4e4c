// Instance of the tile quantizer for 3 bits a weight.
#include "viterbi_launch.cuh"

namespace exl3::search {
template cudaError_t quantize_tiles_k<3>(const Job&, cudaStream_t);
}  // namespace exl3::search
