// Copies of the base model's weights in a PEFT file. PEFT saves the head and
// the embedding if the vocabulary was resized, and the base layer of an adapted
// head. When PEFT loads the adapter, it puts the copies in place of the base's
// weights. A server has one base for all adapters, so a copy must be equal.
// Private to src/lora.
#ifndef WEFT_SRC_LORA_BASE_COPIES_H_
#define WEFT_SRC_LORA_BASE_COPIES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/weights/tensor_types.h"

namespace weft::lora {

struct BaseCopy {
  std::string name;       // In the PEFT file.
  std::string base_name;  // The canonical name in the model folder.
  weights::TensorView view;
};

// Checks that each copy has the values of the folder's tensor, which may be
// rounded to bf16 or f16. A head that the folder lacks is its embedding. Reads
// the folder only if there is a copy. Errors: INVALID_ARGUMENT, which names the
// tensor and the first row that differs; those of weights::Checkpoint.
[[nodiscard]] absl::Status CheckCopies(const std::vector<BaseCopy>& copies,
                                       const std::string& model_dir);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_BASE_COPIES_H_
