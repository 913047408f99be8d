#define WEFT_KERNEL_ISA avx2
#include "kernels/cpu/table_body.h"

namespace weft::kernels::cpu {

const KernelTable& Avx2Table() {
  static constexpr KernelTable kTable = avx2::MakeTable(Isa::kAvx2, "avx2");
  return kTable;
}

}  // namespace weft::kernels::cpu
