// Which instruction set the CPU kernels use. Decided at run time, per call.

#pragma once

namespace exl3 {

enum class Isa { portable, avx2, avx512 };

// The best path of this CPU, or the one that EXLLAMAV3_ISA=portable|avx2|avx512 asks for.
// Throws std::runtime_error if that variable names an unknown path or one the CPU lacks.
Isa active_isa();

const char* isa_name(Isa isa);

}  // namespace exl3
