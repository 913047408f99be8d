// A matrix type and a product for LoRA on a CPU.
#ifndef WEFT_SRC_LORA_LORA_CPU_ROWS_H_
#define WEFT_SRC_LORA_LORA_CPU_ROWS_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/kernels.h"

namespace weft::lora::cpu {

// A matrix in f32. The elements of a row are adjacent.
struct Rows {
  float* data = nullptr;  // Null for an undefined tensor.
  int64_t stride = 0;

  Rows(float* first, int64_t row_stride) : data(first), stride(row_stride) {}
  explicit Rows(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(tensor.size(1) < 2 || tensor.stride(1) == 1,
                "the elements of a row are ", tensor.stride(1), " apart");
    data = tensor.data_ptr<float>();
    stride = tensor.stride(0);
  }

  // Returns the matrix that begins at this row and column.
  [[nodiscard]] Rows From(int64_t row, int64_t column = 0) const {
    return {data + row * stride + column, stride};
  }
};

// Computes y += scale * shrunk W, where W [rank, features] is packed in
// `panels`. Computes a few rows at a time, so that the processor reads and
// writes few memory streams at once.
inline void AddExpansion(const Rows& shrunk, int64_t rank, const float* panels,
                         float scale, int64_t num_rows, const Rows& y,
                         int64_t features) {
  constexpr int64_t kStep = 8;
  for (int64_t row = 0; row < num_rows; row += kStep) {
    kernels::cpu::Kernels().panel_product(
        {.left_MK = shrunk.From(row).data,
         .m_stride = shrunk.stride,
         .right_KN = panels,
         .num_rows = std::min(kStep, num_rows - row),
         .num_terms = rank,
         .num_columns = features,
         .scale = scale,
         .adds = true,
         .out_MN = y.From(row).data,
         .out_stride = y.stride});
  }
}

}  // namespace weft::lora::cpu

#endif  // WEFT_SRC_LORA_LORA_CPU_ROWS_H_
