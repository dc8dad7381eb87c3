#include "cpu.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace localspec {

#if defined(__x86_64__)

// Two that __builtin_cpu_supports of GCC 9 and 10 cannot be asked for.
static bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
}

[[maybe_unused]] static bool has_avxvnni() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 4));
}

bool cpu_has(isa set) {
    __builtin_cpu_init();  // includes what the system saves (XCR0)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    switch (set) {
        case isa::none:
            return true;
        case isa::avx2:
            return avx2;
        case isa::avxvnni:
#if defined(LOCALSPEC_HAS_AVXVNNI)
            return avx2 && has_avxvnni();
#else
            return false;
#endif
        case isa::avx512vnni:
            return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    }
    return false;
}

#else

bool cpu_has(isa set) { return set == isa::none; }

#endif

const char * isa_name(isa set) {
    switch (set) {
        case isa::avx2:       return "AVX2";
        case isa::avxvnni:    return "AVX-VNNI";
        case isa::avx512vnni: return "AVX-512 VNNI";
        default:              return "none";
    }
}

isa cpu_choose() {
    const char * wish = std::getenv("LOCALSPEC_KERNELS");
    if (wish != nullptr && *wish != '\0') {
        const isa set = std::strcmp(wish, "avx2") == 0      ? isa::avx2
                        : std::strcmp(wish, "avxvnni") == 0 ? isa::avxvnni
                        : std::strcmp(wish, "avx512") == 0  ? isa::avx512vnni
                                                            : isa::none;
        if (set != isa::none || std::strcmp(wish, "0") == 0) {
            return cpu_has(set) ? set : isa::none;
        }
    }
    for (isa set : { isa::avx512vnni, isa::avxvnni, isa::avx2 }) {
        if (cpu_has(set)) {
            return set;
        }
    }
    return isa::none;
}

}  // namespace localspec
