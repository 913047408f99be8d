// Names tests that run once for each instruction set.
#ifndef WEFT_TESTS_KERNELS_ISA_NAME_H_
#define WEFT_TESTS_KERNELS_ISA_NAME_H_

#include <string>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cpu {

inline std::string IsaName(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "Baseline";
    case Isa::kAvx2:
      return "Avx2";
    case Isa::kAvx512:
      return "Avx512";
  }
  return "Unknown";
}

}  // namespace weft::kernels::cpu

#endif  // WEFT_TESTS_KERNELS_ISA_NAME_H_
