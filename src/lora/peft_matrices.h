// Lists the matrices of a PEFT file and their places in an adapter's buffer.
// Private to src/lora.
//
// LoRA of experts has two forms in files. In the first form each expert has its
// own modules, like in a checkpoint with a tensor for each expert. In the
// second form, PEFT's target_parameters, one pair of matrices adapts a
// parameter [E, out, in] of all E experts, with LoRA rank R:
//   A [E R, in]   expert by expert
//   B [out, R E]  with the experts innermost
// Gate and up are one parameter, so they share A. With ExpertNames::kFused,
// rows of gate and up alternate in B. Otherwise gate has the first half of B's
// rows and up the second half.
//
// Some models have q, k and v in one module, or gate and up (NumFused). Then
// their A is one, too, and B has rows of q, then of k, then of v.
//
// Such modules, and gate and up of experts, may still have an A and a B of
// their own, each with a half or a third of R (FusedForm::kParts). Gate then
// uses the first half of R: B's other columns are zero in rows of gate. Up uses
// the second half in the same way. Weft writes this form for modules that
// cannot be alone, or that a loader has as one (loader_rules.h).
#ifndef WEFT_SRC_LORA_PEFT_MATRICES_H_
#define WEFT_SRC_LORA_PEFT_MATRICES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/lora/adapter_layout.h"
#include "src/weights/safetensors.h"

namespace weft::lora {

// One matrix of the layout and its place in a tensor of a file. The matrix's
// element [i, j] is the tensor's element [TensorRow(i), first_column + j *
// column_step].
struct PeftMatrix {
  std::string name;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t offset = 0;  // In floats from the start of the buffer.
  int64_t tensor_rows = 0;
  int64_t tensor_columns = 0;
  int64_t first_row = 0;
  int64_t row_step = 1;
  int64_t first_column = 0;
  int64_t column_step = 1;
  // If not empty, row i of the matrix is row row_order[i] of its rows in the
  // tensor.
  std::vector<int> row_order;

  int64_t TensorRow(int64_t row) const {
    if (!row_order.empty()) row = row_order[row];
    return first_row + row * row_step;
  }
  // Returns whether the tensor has the matrix as the buffer has it.
  bool is_whole() const {
    return rows == tensor_rows && columns == tensor_columns &&
           row_order.empty();
  }
};

// How a file stores the LoRA of modules that the model may have as one.
enum class FusedForm : uint8_t {
  kSingle,  // Each has an A and a B of its own.
  kFused,   // One pair of matrices for all experts, or for q, k and v.
  kParts,   // As kFused, with a part of the rank for each module.
};

// Returns whether the factor is of one of the experts that files may have as
// one parameter: not of the shared expert.
bool IsExpert(const LoraFactor& factor,
              const model_config::ExpertShape& experts);

// Returns A and B of each factor of the layout, in order, with their places in
// a file of the form `form`. Names begin with `prefix`.
std::vector<PeftMatrix> MatricesOf(const AdapterLayout& layout,
                                   const model_config::ModelShape& shape,
                                   absl::string_view prefix,
                                   FusedForm form = FusedForm::kSingle);

// Returns the form of a file whose ranks are those of `layout`. `fused` has the
// layout's matrices in a file of the form kFused. Errors: those of Gather.
absl::StatusOr<FusedForm> FormOf(const weights::TensorMap& tensors,
                                 const AdapterLayout& layout,
                                 const model_config::ModelShape& shape,
                                 const std::vector<PeftMatrix>& fused);

// Copies the matrices from the tensors of a file into one buffer of `size`
// floats. Checks all names, shapes and dtypes before it allocates memory, so
// that a small file cannot request a large buffer. Errors: INVALID_ARGUMENT,
// which names the tensor.
absl::StatusOr<std::vector<float>> Gather(
    const weights::TensorMap& tensors, int64_t size,
    const std::vector<PeftMatrix>& matrices);

// A tensor of a file and its values.
struct PeftTensor {
  std::string name;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values;
};
// The reverse of Gather: returns the tensors of a file that contain the
// matrices, with zeros elsewhere.
std::vector<PeftTensor> Scatter(absl::Span<const float> buffer,
                                const std::vector<PeftMatrix>& matrices);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PEFT_MATRICES_H_
