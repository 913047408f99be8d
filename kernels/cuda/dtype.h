// The element types of the CUDA kernels that support several element types.
// These kernels sum in f32.
#ifndef WEFT_KERNELS_CUDA_DTYPE_H_
#define WEFT_KERNELS_CUDA_DTYPE_H_

namespace weft::kernels::cuda {

enum class DType { kF32, kBf16 };

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_DTYPE_H_
