// Which instruction set the kernels use on this CPU.
#pragma once

// The first compilers that know AVX-VNNI.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define LOCALSPEC_HAS_AVXVNNI
#endif

namespace localspec {

// In order of preference: a later one is faster wherever it exists.
enum class isa : int { none = 0, avx2 = 1, avxvnni = 2, avx512vnni = 3 };

// Whether this CPU and this build have `set`; the system must save its registers too.
bool cpu_has(isa set);

// The best one there is, or what LOCALSPEC_KERNELS=0|avx2|avxvnni|avx512 allows: the named one, none where it is missing.
isa cpu_choose();

const char * isa_name(isa set);

}  // namespace localspec
