// Elementwise passes that the peers need beside cuBLAS.
#ifndef WEFT_KERNELS_CUDA_BENCH_PEER_PASSES_H_
#define WEFT_KERNELS_CUDA_BENCH_PEER_PASSES_H_

#include <cstdint>

namespace weft::kernels::cuda::bench {

// In place, bf16: x[t, c] *= scale_C[c] where adapter_C[c] is the row's adapter
// t / rows_each, 0 elsewhere.
void MaskColumns(int64_t num_rows, int64_t num_columns, int64_t rows_each,
                 const int32_t* adapter_C, const float* scale_C,
                 uint16_t* x_TC);

}  // namespace weft::kernels::cuda::bench

#endif  // WEFT_KERNELS_CUDA_BENCH_PEER_PASSES_H_
