// The instruction sets of this processor. With RINGWEAVE_BEST this file is a program that prints the best one, which
// CMakeLists.txt runs to build for this machine only.
#include "processor.h"

#if (defined(__aarch64__) || defined(_M_ARM64)) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace ringweave {
namespace {

#if defined(__aarch64__)
// Whether the processor multiplies pairs of bfloat16; all 64-bit processors have the other instructions.
bool has_bf16() {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) >> 14 & 1;  // HWCAP2_BF16, which older headers do not define
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  return !sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) && found;
#else
  return false;
#endif
}
#endif

}  // namespace

std::vector<const char *> instruction_sets() {
  std::vector<const char *> found;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
  // Golden Cove multiplies pairs of bfloat16 at half the speed of floats, so widening them to floats is faster
  const bool slow_pairs = pairs && __builtin_cpu_is("intel") && !__builtin_cpu_is("cooperlake");
  if (slow_pairs) found.push_back("avx512");
  if (pairs) found.push_back("avx512bf16");
  if (avx512 && !slow_pairs) found.push_back("avx512");
  if (avx2) found.push_back("avx2");
#elif defined(__aarch64__)
  if (has_bf16()) found.push_back("neonbf16");
  found.push_back("neon");
#endif
  found.push_back("generic");
  return found;
}

}  // namespace ringweave

#if defined(RINGWEAVE_BEST)
#include <stdio.h>
int main() { return puts(ringweave::instruction_sets()[0]) < 0; }
#endif
