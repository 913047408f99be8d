// The matrices of a PEFT file and their places in an adapter's buffer. Private
// to src/peft.
//
// LoRA of experts has two forms in files. One has a module for each expert, as
// checkpoints do. The other one, target_parameters, has one pair of matrices
// for the experts' fused parameter [E, out, in], where gate and up are one:
//   A [E R, in]   expert by expert
//   B [out, R E]  with the experts innermost
// Gate and up then have the same A, and one half of B's rows each, or every
// other row in a model of ExpertNames::kFused. If B is zero where gate meets
// the second half of the rank and up the first one, the pair stands for two
// adapters of half the rank, each with an A of its own. That is how a model
// without modules of single experts is written.
#ifndef WEFT_SRC_PEFT_PEFT_MATRICES_H_
#define WEFT_SRC_PEFT_PEFT_MATRICES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/peft/adapter_layout.h"
#include "src/weights/safetensors.h"

namespace weft::lora {

// One matrix of the layout and its place in a tensor of a file. Its element
// [i, j] is the tensor's element
// [first_row + i * row_step, first_column + j * column_step].
struct PeftMatrix {
  std::string name;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t offset = 0;  // Offset in floats from the start of the buffer.
  int64_t tensor_rows = 0;
  int64_t tensor_columns = 0;
  int64_t first_row = 0;
  int64_t row_step = 1;
  int64_t first_column = 0;
  int64_t column_step = 1;
};

// How a file has the LoRA of experts.
enum class ExpertForm : uint8_t {
  kSingle,  // A module for each expert.
  kFused,   // Pairs of the fused parameters.
  kHalves,  // The same; gate and up have one half of the rank each.
};

// Returns all matrices, in the order of the layout's factors.
[[nodiscard]] std::vector<PeftMatrix> MatricesOf(
    const AdapterLayout& layout, const ExpertShape& experts,
    absl::string_view prefix, ExpertForm form = ExpertForm::kSingle);

// Returns the form of a file whose ranks are those of `layout`. kHalves is
// possible only for a model of ExpertNames::kFused. Errors: those of Gather.
[[nodiscard]] absl::StatusOr<ExpertForm> FormOf(
    const weights::TensorMap& tensors, const AdapterLayout& layout,
    const ExpertShape& experts, absl::string_view prefix);

// Gathers the matrices into one buffer of `size` floats. Checks all names,
// shapes and dtypes before it allocates memory, so that a small file cannot
// request a large buffer. Errors: INVALID_ARGUMENT, which names the tensor.
[[nodiscard]] absl::StatusOr<std::vector<float>> Gather(
    const weights::TensorMap& tensors, int64_t size,
    const std::vector<PeftMatrix>& matrices);

// The reverse: a tensor of a file and its values.
struct PeftTensor {
  std::string name;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values;
};
// Returns the tensors that have the matrices, with zeros elsewhere.
[[nodiscard]] std::vector<PeftTensor> Scatter(
    absl::Span<const float> buffer, const std::vector<PeftMatrix>& matrices);

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_PEFT_MATRICES_H_
