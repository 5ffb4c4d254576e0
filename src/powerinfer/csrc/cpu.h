// The instruction-set levels that this CPU, and its operating system, can run. Also compiled alone, by CMakeLists.txt, to
// ask which level a build for this machine needs.
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
inline uint64_t xcr0() {
  uint32_t lo, hi;
  __asm__("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t)hi << 32 | lo;
}

// Linux grants the 8 KiB of tile state only on request (ARCH_REQ_XCOMP_PERM, feature 18).
inline bool ask_for_tiles() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

struct Cpu {
  bool avx2 = false, avxvnni = false, avx512 = false, avx512bf16 = false, amx = false;
  Cpu() {
    unsigned a, b, c, d, b7, c7, d7, a71, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
    const bool fma = c & bit_FMA, f16c = c & bit_F16C;
    const uint64_t state = xcr0();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return;
    if (!__get_cpuid_count(7, 1, &a71, &unused, &unused, &unused)) a71 = 0;
    avx2 = (state & 6) == 6 && fma && f16c && (b7 & bit_AVX2);
    avxvnni = avx2 && (a71 >> 4 & 1);
    const unsigned needed = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    avx512 = avx2 && (state & 0xe6) == 0xe6 && (b7 & needed) == needed && (c7 & bit_AVX512VNNI);
    avx512bf16 = avx512 && (a71 >> 5 & 1);
    const unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
    amx = avx512bf16 && (state & 0x60000) == 0x60000 && (d7 & tiles) == tiles && ask_for_tiles();
  }
};
#endif

// Best first; every CPU can run the last, "scalar".
inline std::vector<std::string> cpu_levels() {
  std::vector<std::string> levels;
#if defined(__x86_64__)
  static const Cpu cpu;
  if (cpu.amx) levels.push_back("amx");
  if (cpu.avx512bf16) levels.push_back("avx512bf16");
  if (cpu.avx512) levels.push_back("avx512");
  if (cpu.avxvnni) levels.push_back("avxvnni");
  if (cpu.avx2) levels.push_back("avx2");
#elif defined(__aarch64__) && defined(__linux__)
  if (getauxval(AT_HWCAP) & (1ul << 20)) levels.push_back("neon");  // HWCAP_ASIMDDP
#elif defined(__aarch64__)
  levels.push_back("neon");
#endif
  levels.push_back("scalar");
  return levels;
}
