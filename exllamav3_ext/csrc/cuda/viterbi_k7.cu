// Instance of the tile quantizer for 7 bits a weight.
#include "viterbi_launch.cuh"

namespace exl3::search {
template cudaError_t quantize_tiles_k<7>(const Job&, cudaStream_t);
}  // namespace exl3::search
