// The element types that the CUDA kernels read and write. The kernels compute
// in f32.
#ifndef WEFT_KERNELS_CUDA_DTYPE_H_
#define WEFT_KERNELS_CUDA_DTYPE_H_

namespace weft::kernels::cuda {

enum class DType { kF32, kBf16 };

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_DTYPE_H_
