// Reads and writes adapters as PEFT folders: adapter_config.json and
// adapter_model.safetensors. Torch-free. The files come from clients and are
// not trusted.
#ifndef WEFT_SRC_LORA_PEFT_FORMAT_H_
#define WEFT_SRC_LORA_PEFT_FORMAT_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/lora/adapter_layout.h"
#include "src/request/adapter.h"

namespace weft::lora {

// An adapter that was read from a PEFT folder. `weights` has the layout
// AdapterLayout(shape, config).
struct PeftAdapter {
  LoraConfig config;
  std::vector<float> weights;
};

// Reads a PEFT LoRA folder. Supports rslora (as a factor of alpha),
// rank_pattern, alpha_pattern, layers_to_transform, exclude_modules and
// target_parameters, and tensors in F32, F16 and BF16. Refuses DoRA, biases,
// modules_to_save, fan_in_fan_out, values that are not finite, and every
// unknown field that is not null, false or empty. The folder must have every
// targeted layer in the right shape. The file of tensors may also have copies
// of the base model's weights, but no other tensor. The copies
// must equal the tensors of `model_dir`; if it is empty, only their shapes are
// checked. Accepts every spelling of DecoderNames. `expected`, if not null, is
// the config of an adapter that WritePeft wrote: some files of new adapters
// mean the same with two layouts. Errors: INVALID_ARGUMENT, which names the
// violated rule.
absl::StatusOr<PeftAdapter> ReadPeft(const PeftFiles& files,
                                     const model_config::ModelShape& model,
                                     const std::string& model_dir = "",
                                     const LoraConfig* expected = nullptr);

// Returns the files of a PEFT folder for an adapter with these weights, which
// have the layout AdapterLayout(model, config). The folder is for a loader that
// CheckLoader (loader_rules.h) accepts, or, without one, for ReadPeft alone,
// which then returns the same layout. ReadPeft reads the others, too, as
// adapters that compute the same. Tensors are F32. Equal inputs give equal
// bytes.
PeftFiles WritePeft(const LoraConfig& config,
                    const model_config::ModelShape& model,
                    absl::Span<const float> weights,
                    const std::string& base_model_name,
                    std::optional<Loader> loader = std::nullopt);

// A buffer of optimizer state, such as "exp_avg", in the adapter's layout.
struct NamedBuffer {
  std::string name;
  absl::Span<const float> values;
};
// Returns a safetensors file of the buffers. A tensor's name is `<buffer
// name>.<module path>` with PEFT's suffix, such as ".lora_A.weight".
std::string WriteBuffers(const LoraConfig& config,
                         const model_config::ModelShape& shape,
                         absl::Span<const NamedBuffer> buffers);

// Reads one buffer from a file of WriteBuffers. Errors: those of
// weights::ParseSafetensors; INVALID_ARGUMENT, naming the tensor, if it is
// missing or has another shape or dtype.
absl::StatusOr<std::vector<float>> ReadBuffer(
    const std::string& safetensors, const std::string& buffer_name,
    const LoraConfig& config, const model_config::ModelShape& shape);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PEFT_FORMAT_H_
