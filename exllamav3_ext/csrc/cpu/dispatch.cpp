#include "cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace exl3 {
namespace {

Isa best_isa() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    return avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::portable;
#else
    return Isa::portable;
#endif
}

}  // namespace

const char* isa_name(Isa isa) {
    return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "portable";
}

Isa active_isa() {
    static const Isa best = best_isa();
    const char* value = std::getenv("EXLLAMAV3_ISA");
    if (value == nullptr || *value == '\0') return best;
    for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
        if (std::string(value) != isa_name(isa)) continue;
        if (isa > best)
            throw std::runtime_error(std::string("EXLLAMAV3_ISA=") + value +
                                     ", but this CPU only has " + isa_name(best));
        return isa;
    }
    throw std::runtime_error(std::string("EXLLAMAV3_ISA=") + value +
                             " is unknown: use portable, avx2 or avx512");
}

}  // namespace exl3
