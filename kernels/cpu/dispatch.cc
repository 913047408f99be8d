#if defined(__x86_64__)
#define _Bool bool  // The header is for C, and clang has this type only there.
#include <sys/platform/x86.h>
#undef _Bool
#endif

#include <initializer_list>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/tables.h"

namespace weft::kernels::cpu {

// Asks the C library for instructions, so that tests can hide some with
// GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F, as on an older processor.
const KernelTable* KernelsFor(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return &BaselineTable();
#if defined(__x86_64__)
    case Isa::kAvx2:
      if (CPU_FEATURE_ACTIVE(AVX2) && CPU_FEATURE_ACTIVE(FMA)) {
        return &Avx2Table();
      }
      return nullptr;
    case Isa::kAvx512:
      if (CPU_FEATURE_ACTIVE(AVX512F) && CPU_FEATURE_ACTIVE(AVX512BW) &&
          CPU_FEATURE_ACTIVE(AVX512DQ) && CPU_FEATURE_ACTIVE(AVX512VL)) {
        return &Avx512Table();
      }
      return nullptr;
#endif
    default:
      return nullptr;
  }
}

const KernelTable& Kernels() {
  static const KernelTable& best = []() -> const KernelTable& {
    for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
      if (const KernelTable* table = KernelsFor(isa)) return *table;
    }
    return BaselineTable();
  }();
  return best;
}

const Bf16KernelTable* Bf16Kernels() {
#if defined(__x86_64__)
  static const bool has_instructions =
      CPU_FEATURE_ACTIVE(AVX512_BF16) && KernelsFor(Isa::kAvx512);
  return has_instructions ? &Bf16Avx512Table() : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace weft::kernels::cpu
