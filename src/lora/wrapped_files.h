// PEFT files of a wrapped model (DecoderNames). Private to src/lora.
#ifndef WEFT_SRC_LORA_WRAPPED_FILES_H_
#define WEFT_SRC_LORA_WRAPPED_FILES_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "src/lora/adapter_layout.h"
#include "src/weights/safetensors.h"

namespace weft::lora {

// The beginning of all names in a PEFT file.
inline constexpr absl::string_view kPeftPrefix = "base_model.model";

// Returns how the file spells the paths of the decoder's modules. Returns
// `usual` for a file without a tensor of the decoder.
[[nodiscard]] DecoderNames NamesIn(const weights::TensorMap& tensors,
                                   DecoderNames usual);

// Removes LoRA of the parts that read images. PEFT adds it where target_modules
// has names such as q_proj, and training on text leaves its B at 0. Errors:
// INVALID_ARGUMENT, naming the tensor, if a B is not 0.
[[nodiscard]] absl::Status DropImageParts(weights::TensorMap& tensors);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_WRAPPED_FILES_H_
