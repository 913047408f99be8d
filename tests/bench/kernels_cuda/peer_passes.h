// Elementwise passes that the peers need in addition to cuBLAS.
#ifndef WEFT_TESTS_BENCH_KERNELS_CUDA_PEER_PASSES_H_
#define WEFT_TESTS_BENCH_KERNELS_CUDA_PEER_PASSES_H_

#include <cstdint>

namespace weft::kernels::cuda::bench {

// Scales the bf16 matrix x in place. Row t belongs to adapter t / rows_each. If
// adapter_C[c] is this adapter, x[t, c] *= scale_C[c]; otherwise x[t, c] = 0.
void MaskColumns(int64_t num_rows, int64_t num_columns, int64_t rows_each,
                 const int32_t* adapter_C, const float* scale_C,
                 uint16_t* x_TC);

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_TESTS_BENCH_KERNELS_CUDA_PEER_PASSES_H_
