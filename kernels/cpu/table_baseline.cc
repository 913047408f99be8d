#define WEFT_KERNEL_ISA baseline
#include "kernels/cpu/table_body.h"

namespace weft::kernels::cpu {

const KernelTable& BaselineTable() {
  static constexpr KernelTable kTable =
      baseline::MakeTable(Isa::kBaseline, "baseline");
  return kTable;
}

}  // namespace weft::kernels::cpu
