// Arguments of row_product_* of kernels.h: products of rows of x with rows of a
// weight. Legend: B rows, I inputs, O outputs.
#ifndef WEFT_KERNELS_CPU_ROW_PRODUCT_H_
#define WEFT_KERNELS_CPU_ROW_PRODUCT_H_

#include <cstdint>

namespace weft::kernels::cpu {

// Up to this many rows of x are read where they are. More rows are copied, so
// that the product reads them as one stream of memory.
inline constexpr int64_t kFewRows = 32;

// The most rows of x that are copied at a time. The number is a multiple of the
// rows of every kernel's tile.
inline constexpr int64_t kRowBlock = 96;

// The inputs of a sum are cut into parts of this size. The sums of the parts
// are added in order. So the copied rows fit in the second-level cache.
inline constexpr int64_t kRowPart = 1024;

// The number of outputs that are computed together. Ranges whose size is a
// multiple of this number are computed fastest.
inline constexpr int64_t kRowOutputs = 4;

// The number of outputs whose weights are widened to f32 at a time.
inline constexpr int64_t kWideOutputs = 16;

// The size of RowProduct::memory in floats: the copied rows, then the widened
// weights.
inline constexpr int64_t kRowProductFloats =
    (kRowBlock + kWideOutputs) * kRowPart;

// The product of rows of x with the rows [begin, end) of a weight [O, I].
// Strides count elements from row to row. Elements of a row are adjacent.
struct RowProduct {
  const float* x_BI = nullptr;
  int64_t x_stride = 0;
  int64_t num_rows = 1;           // B >= 1.
  int64_t num_inputs = 0;         // I.
  int64_t weight_stride = 0;      // In elements; for 8-bit weights, in bytes.
  const float* bias_O = nullptr;  // Null if there is no bias.
  float* y_BO = nullptr;
  int64_t y_stride = 0;
  int64_t begin = 0;  // Only outputs [begin, end) are written.
  int64_t end = 0;
  // kRowProductFloats floats. Null is allowed if num_rows <= kFewRows.
  float* memory = nullptr;
};

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_ROW_PRODUCT_H_
