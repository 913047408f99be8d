// The tables of kernels for dispatch.cc. Each is defined in the source that is
// compiled for its instruction set.
#ifndef WEFT_KERNELS_CPU_TABLES_H_
#define WEFT_KERNELS_CPU_TABLES_H_

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/kernels.h"

namespace weft::kernels::cpu {

const KernelTable& BaselineTable();
const KernelTable& Avx2Table();
const KernelTable& Avx512Table();
const Bf16KernelTable& Bf16Avx512Table();

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_TABLES_H_
