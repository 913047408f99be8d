// Arguments of skinny_product_* of kernels.h, the products of few rows. Legend:
// B rows, I inputs, O outputs.
#ifndef WEFT_KERNELS_CPU_SKINNY_PRODUCT_H_
#define WEFT_KERNELS_CPU_SKINNY_PRODUCT_H_

#include <cstdint>

namespace weft::kernels::cpu {

// The product of a few rows of x with the rows [begin, end) of a weight [O, I].
// Strides count elements from row to row. Elements of a row are adjacent.
struct SkinnyProduct {
  const float* x_BI = nullptr;
  int64_t x_stride = 0;
  int64_t num_rows = 1;           // B >= 1.
  int64_t num_inputs = 0;         // I.
  int64_t weight_stride = 0;      // In elements; for 8-bit weights, in bytes.
  const float* bias_O = nullptr;  // Null if there is no bias.
  float scale = 1;                // Multiplies the product, but not the bias.
  bool adds = false;              // If true, adds to y; otherwise overwrites
                                  // it.
  float* y_BO = nullptr;
  int64_t y_stride = 0;
  int64_t begin = 0;  // Only outputs [begin, end) are written.
  int64_t end = 0;
};

// The number of outputs that skinny_product_* computes together. Ranges whose
// size is a multiple of this number are computed fastest.
inline constexpr int64_t kSkinnyOutputs = 4;

// Callers of these products pass at most this many rows in one call.
inline constexpr int64_t kSkinnyRows = 32;

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_SKINNY_PRODUCT_H_
