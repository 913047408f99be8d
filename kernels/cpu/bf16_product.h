// Products whose operands are bf16 and whose sums are f32, for processors with
// the instructions of AVX512_BF16.
//
// A panel is a block of the weight: up to kBf16PanelOutputs outputs by up to
// kBf16PanelInputs inputs. A caller packs a panel once and multiplies any
// number of rows with it, while the panel stays in the second-level cache.
#ifndef WEFT_KERNELS_CPU_BF16_PRODUCT_H_
#define WEFT_KERNELS_CPU_BF16_PRODUCT_H_

#include <cstdint>

namespace weft::kernels::cpu {

inline constexpr int64_t kBf16PanelOutputs = 64;
// Must be even, because a panel stores inputs in pairs.
inline constexpr int64_t kBf16PanelInputs = 2048;

// Memory for a packed panel. Kernels take panels at any address. The alignment
// is for speed: each vector is one cache line.
struct alignas(64) Bf16Panel {
  uint16_t elements[kBf16PanelOutputs * kBf16PanelInputs];
};

// The part of a weight that becomes a panel. Strides count elements. One of the
// two strides is 1. Element is float, or uint16_t for bf16.
template <typename Element>
struct Bf16PanelSource {
  const Element* weight = nullptr;  // At the panel's first input and output.
  int64_t input_stride = 0;
  int64_t output_stride = 0;
  int64_t num_inputs = 0;   // In [1, kBf16PanelInputs].
  int64_t num_outputs = 0;  // In [1, kBf16PanelOutputs].
};

// Further terms of a product, such as those of an adapter: the rows of a matrix
// times a packed panel. This panel may have any number of inputs.
struct Bf16Terms {
  const uint16_t* x = nullptr;  // A matrix in bf16 with adjacent inputs.
  int64_t x_row_stride = 0;
  const uint16_t* panel = nullptr;
  int64_t num_inputs = 0;  // 0: no terms.
};

// A product of rows with a packed panel. Legend: B rows, I the panel's inputs
// rounded up to an even number, O its outputs. The pair of inputs (i, i + 1) of
// row b is at x[b * x_row_stride + i / 2 * x_pair_stride]. So x may be a matrix
// with pair stride 2. x may also be a packed panel whose outputs are the rows,
// with row stride 2 and pair stride 2 * kBf16PanelOutputs.
struct Bf16PanelProduct {
  const uint16_t* x = nullptr;  // If num_inputs is odd, a 0 follows each row.
  int64_t x_row_stride = 0;
  int64_t x_pair_stride = 2;
  int64_t num_rows = 0;
  const uint16_t* panel = nullptr;
  int64_t num_inputs = 0;   // The num_inputs of the panel's source.
  int64_t num_outputs = 0;  // O.
  bool adds = false;  // If true, the sums begin with y; otherwise with zero.
  Bf16Terms last;     // Added to the sums after the product.
  float* y_BO = nullptr;
  int64_t y_stride = 0;
};

struct Bf16KernelTable {
  const char* name;

  // Multiplies a row by `scale`, and rounds it to bf16 (to nearest, ties to
  // even). If `count` is odd, writes one zero after the row.
  void (*round_row)(const float* x, float scale, int64_t count, uint16_t* y);
  // Packs a panel. For each pair of inputs, the panel has the two weights of
  // each of kBf16PanelOutputs outputs. Missing outputs become zeros. If
  // num_inputs is odd, the second weights of the last pair are zeros.
  void (*pack_panel)(const Bf16PanelSource<uint16_t>& source, uint16_t* panel);
  // Multiplies a weight by `scale`, rounds it as round_row does, and packs it.
  void (*round_panel)(const Bf16PanelSource<float>& source, float scale,
                      uint16_t* panel);
  // Computes y = x W + last, or y += x W + last if `adds`. W is the panel. Sums
  // are f32, in the order of the inputs. So the bits of an element of y do not
  // depend on other rows, and a sum over several panels has the bits of one
  // long sum. The instructions read subnormal operands as zero. A NaN in x
  // affects only its row of y, and a NaN in W only its column of y.
  void (*multiply_panel)(const Bf16PanelProduct& item);
};

// Returns the kernels, or null if the processor or the build lacks the
// instructions. Threads: any.
const Bf16KernelTable* Bf16Kernels();

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_BF16_PRODUCT_H_
