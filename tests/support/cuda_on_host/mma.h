// Tensor-core tiles on the host; see cuda_runtime_api.h. A warp's fragment is
// lane 0's; how a device spreads its elements over the lanes is not modelled,
// as it is not for kernels to know.
#ifndef WEFT_TESTS_SUPPORT_CUDA_ON_HOST_MMA_H_
#define WEFT_TESTS_SUPPORT_CUDA_ON_HOST_MMA_H_

#include <cstdint>
#include <cstdlib>

#include "cuda_bf16.h"
#include "cuda_runtime.h"

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

inline constexpr unsigned kTile = 16;

template <typename Use, int kM, int kN, int kK, typename T,
          typename Layout = void>
struct fragment {
  static_assert(kM == kTile && kN == kTile && kK == kTile);
  float x[kTile][kTile];
};

// Lane 0 of a warp, all lanes of which are here.
inline bool IsFirstOfWarp() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}

// A device takes tiles at multiples of 32 bytes and strides of 16 alone.
template <typename T>
void CheckAlignment(const T* data, unsigned stride) {
  if (reinterpret_cast<uintptr_t>(data) % 32 != 0 ||
      stride * sizeof(T) % 16 != 0) {
    std::abort();
  }
}

template <typename Use, typename Layout>
void load_matrix_sync(
    fragment<Use, 16, 16, 16, __nv_bfloat16, Layout>& fragment,
    const __nv_bfloat16* data, unsigned stride) {
  CheckAlignment(data, stride);
  if (!IsFirstOfWarp()) return;
  constexpr bool kRows = __is_same(Layout, row_major);
  for (unsigned i = 0; i < kTile; ++i) {
    for (unsigned j = 0; j < kTile; ++j) {
      fragment.x[i][j] =
          __bfloat162float(data[kRows ? i * stride + j : j * stride + i]);
    }
  }
}

template <typename Fragment>
void fill_fragment(Fragment& fragment, float value) {
  if (!IsFirstOfWarp()) return;
  for (auto& row : fragment.x) {
    for (float& x : row) x = value;
  }
}

template <typename A, typename B, typename C>
void mma_sync(C& d, const A& a, const B& b, const C& c) {
  if (!IsFirstOfWarp()) return;
  for (unsigned i = 0; i < kTile; ++i) {
    for (unsigned j = 0; j < kTile; ++j) {
      float sum = c.x[i][j];
      for (unsigned k = 0; k < kTile; ++k) sum += a.x[i][k] * b.x[k][j];
      d.x[i][j] = sum;
    }
  }
}

template <typename Fragment>
void store_matrix_sync(float* data, const Fragment& fragment, unsigned stride,
                       layout_t layout) {
  CheckAlignment(data, stride);
  if (!IsFirstOfWarp()) return;
  for (unsigned i = 0; i < kTile; ++i) {
    for (unsigned j = 0; j < kTile; ++j) {
      data[layout == mem_row_major ? i * stride + j : j * stride + i] =
          fragment.x[i][j];
    }
  }
}

}  // namespace nvcuda::wmma

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_MMA_H_
