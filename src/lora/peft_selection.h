// Selects modules by the target_modules, target_parameters, exclude_modules and
// layer fields of an adapter_config.json. Here a site is a module that LoRA can
// adapt. Private to src/lora.
#ifndef WEFT_SRC_LORA_PEFT_SELECTION_H_
#define WEFT_SRC_LORA_PEFT_SELECTION_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/peft_fields.h"
#include "src/request/adapter.h"

namespace weft::lora {

// Returns every site of the model, in the order of AdapterLayout.
[[nodiscard]] std::vector<LoraFactor> EverySite(const ModelShape& shape);

// Returns whether the module is gate, up or down.
[[nodiscard]] bool IsOfMlp(TargetModule module);

// Returns the entry of target_modules that selects this module in every layer.
[[nodiscard]] const char* NameOf(TargetModule module, const ModelShape& shape);

// Returns the maximum number of entries in a list or pattern of a file.
[[nodiscard]] size_t MaxEntries(const ModelShape& shape);

// Returns, for every site, whether target_parameters selects it. This field
// names fused parameters: mlp.experts.gate_up_proj and mlp.experts.down_proj. A
// fused parameter holds weights of all experts of a layer, except the shared
// expert. Errors: those of SelectSites.
[[nodiscard]] absl::StatusOr<std::vector<bool>> SelectFused(
    const PeftJson& root, const ModelShape& shape,
    const std::vector<LoraFactor>& sites);

// Returns the path of the fused parameter that contains the site, such as
// "model.layers.0.mlp.experts.gate_up_proj".
[[nodiscard]] std::string FusedPath(const LoraFactor& site,
                                    const ModelShape& shape);

// Returns the path of the site in the spelling of shape.names.
[[nodiscard]] std::string FilePath(const LoraFactor& site,
                                   const ModelShape& shape);

// Returns, for every site, whether the file selects it as a module. If the file
// selects none, returns an error unless `may_be_none`. The cost of regular
// expressions is subtracted from `instructions_left` (path_expression.h).
// Errors: INVALID_ARGUMENT, which names the field, its value and what is
// accepted.
[[nodiscard]] absl::StatusOr<std::vector<bool>> SelectSites(
    const PeftJson& root, const ModelShape& shape,
    const std::vector<LoraFactor>& sites, bool may_be_none,
    int& instructions_left);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_PEFT_SELECTION_H_
