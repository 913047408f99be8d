#include <initializer_list>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/tables.h"

namespace weft::kernels::cpu {

const KernelTable* KernelsFor(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return &BaselineTable();
#if defined(__x86_64__)
    case Isa::kAvx2:
      if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return &Avx2Table();
      }
      return nullptr;
    case Isa::kAvx512:
      if (__builtin_cpu_supports("avx512f") &&
          __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")) {
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
      __builtin_cpu_supports("avx512bf16") && KernelsFor(Isa::kAvx512);
  return has_instructions ? &Bf16Avx512Table() : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace weft::kernels::cpu
