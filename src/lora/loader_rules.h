// What programs that load PEFT folders need of a file besides PEFT's format.
//
// PEFT 0.21 (utils/transformers_weight_conversion.py) turns every target module
// that ends in gate_proj, up_proj or down_proj into the experts' fused
// parameters if the family had single experts in transformers 4, and finds no
// single experts in other families. So LoRA of a model with experts is in
// target_parameters: the experts' fused parameters, and the weights of the
// other MLPs.
//
// vLLM (lora/peft_helper.py, lora/lora_model.py) takes lora_alpha / r for every
// module, whatever the patterns say. It loads the classes that config.json
// names, and wants the fused form of experts where such a class has
// is_3d_moe_weight, else single experts.
//
// llama.cpp (convert_lora_to_gguf.py, src/llama-adapter.h) divides lora_alpha
// by the module's own rank, and has no names for fused experts.
#ifndef WEFT_SRC_LORA_LOADER_RULES_H_
#define WEFT_SRC_LORA_LOADER_RULES_H_

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/peft_matrices.h"
#include "src/model_config/model_shape.h"
#include "src/request/adapter.h"

namespace weft::lora {

struct FileRules {
  model_config::DecoderNames names = model_config::DecoderNames::kPlain;
  FusedForm form = FusedForm::kSingle;
  // The weights of MLPs that are no experts are in target_parameters.
  bool mlp_parameters = false;
  bool one_scale = false;  // All modules have the same alpha / rank.
  bool one_rank = false;   // All tensors have the same rank.
};
// Without a loader: the rules of the server's own checkpoints.
FileRules RulesOf(std::optional<Loader> loader,
                  const model_config::ModelShape& shape);

// Returns an error if the loader has no place for a part of the adapter, or if
// gate and up of experts, which it has as one, differ in rank or scale. Errors:
// FAILED_PRECONDITION, which names the modules.
absl::Status CheckLoader(Loader loader, const AdapterLayout& layout,
                         const model_config::ModelShape& shape);

// Returns the config with alphas that give every module the scale of the
// config's own rank and alpha.
LoraConfig WithOneScale(LoraConfig config);

// Returns the weights of `layout` with each B multiplied such that the adapter
// of WithOneScale computes the same.
std::vector<float> ScaledWeights(const AdapterLayout& layout,
                                 absl::Span<const float> weights);

// Gives all tensors of a file the largest rank among them, with zeros in the
// further rows of A and columns of B. `matrices` are A and B in turn. Returns
// that rank.
int PadToOneRank(std::vector<PeftMatrix>& matrices);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LOADER_RULES_H_
