#define WEFT_KERNEL_ISA avx512
#include "kernels/cpu/table_body.h"

namespace weft::kernels::cpu {

const KernelTable& Avx512Table() {
  static constexpr KernelTable kTable =
      avx512::MakeTable(Isa::kAvx512, "avx512");
  return kTable;
}

}  // namespace weft::kernels::cpu
