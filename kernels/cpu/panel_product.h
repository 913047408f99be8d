// Arguments of panel_product and copy_panels of kernels.h. A panel
// is a copy of a few adjacent columns of a product's right matrix, in the order
// in which the product reads them.
//
// Legend: M rows, K terms of a sum, N columns. Strides count elements.
#ifndef WEFT_KERNELS_CPU_PANEL_PRODUCT_H_
#define WEFT_KERNELS_CPU_PANEL_PRODUCT_H_

#include <cstdint>

namespace weft::kernels::cpu {

// Returns the most floats that the panels of a matrix [K, N] take with any
// instruction set.
constexpr int64_t PanelFloats(int64_t num_terms, int64_t num_columns) {
  constexpr int64_t kWidestVector = 16;
  return num_terms * ((num_columns + kWidestVector - 1) / kWidestVector) *
         kWidestVector;
}

// A copy of a matrix [K, N] to panels.
struct PanelCopy {
  // The element (k, n) is at k * k_stride + n * n_stride. One of the two
  // strides is 1.
  const float* from_KN = nullptr;
  int64_t k_stride = 0;
  int64_t n_stride = 1;
  int64_t num_terms = 0;    // K.
  int64_t num_columns = 0;  // N.
  float* panels = nullptr;  // PanelFloats(K, N) floats.
};

// A product of a matrix [M, K] with a matrix [K, N].
struct PanelProduct {
  // The element (m, k) is at m * m_stride + k * k_stride.
  const float* left_MK = nullptr;
  int64_t m_stride = 0;
  int64_t k_stride = 1;
  // Panels from copy_panels, or the matrix itself if the elements of each row
  // are adjacent.
  const float* right_KN = nullptr;
  int64_t right_stride = 0;  // Floats from one row to the next; 0 for panels.
  int64_t num_rows = 0;      // M.
  int64_t num_terms = 0;     // K >= 1.
  int64_t num_columns = 0;   // N.
  float scale = 1;           // Multiplies the product.
  bool adds = false;         // True: adds to out_MN; false: overwrites it.
  // True: every sum begins with what it adds to, and adds its terms one after
  // another. Then the bits are the same if the terms are cut into several
  // products, each of which adds to the one before. `scale` must be 1.
  bool in_order = false;
  float* out_MN = nullptr;
  int64_t out_stride = 0;
};

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_PANEL_PRODUCT_H_
