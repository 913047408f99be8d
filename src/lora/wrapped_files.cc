#include "src/lora/wrapped_files.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace weft::lora {

using weights::TensorMap;

DecoderNames NamesIn(const TensorMap& tensors, DecoderNames usual) {
  for (const DecoderNames names :
       {DecoderNames::kWrapped, DecoderNames::kOldWrapped,
        DecoderNames::kPlain}) {
    for (const char* stem : {"model.layers.", "model.embed_tokens."}) {
      const std::string prefix =
          absl::StrCat(kPeftPrefix, ".", PathInFile(stem, names));
      const auto found = tensors.lower_bound(prefix);
      if (found != tensors.end() && absl::StartsWith(found->first, prefix)) {
        return names;
      }
    }
  }
  return usual;
}

absl::Status DropImageParts(TensorMap& tensors) {
  for (auto it = tensors.begin(); it != tensors.end();) {
    const auto& [name, view] = *it;
    if (!absl::StrContains(name, ".vision_tower.") &&
        !absl::StrContains(name, ".multi_modal_projector.")) {
      ++it;
      continue;
    }
    const bool is_zero = std::ranges::all_of(
        view.bytes, [](std::byte byte) { return byte == std::byte{0}; });
    if (!is_zero && !absl::EndsWith(name, ".lora_A.weight")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor '", name,
          "' changes how the model reads images, which this server does not "
          "serve; train with target_modules of the language model alone"));
    }
    it = tensors.erase(it);
  }
  return absl::OkStatus();
}

}  // namespace weft::lora
