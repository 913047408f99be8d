#include "src/lora/peft_format.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/lora/base_copies.h"
#include "src/lora/peft_config.h"
#include "src/lora/peft_fields.h"
#include "src/lora/peft_matrices.h"
#include "src/lora/wrapped_files.h"
#include "src/weights/safetensors.h"

namespace weft::lora {
namespace {

using weights::NamedTensor;
using weights::ScalarType;
using weights::TensorMap;
using weights::TensorView;

constexpr absl::string_view kTensorFile = "adapter_model.safetensors";

// Refuses an adapter with NaN or infinity, because training could not use it.
absl::Status CheckFinite(absl::Span<const float> buffer,
                         const std::vector<PeftMatrix>& matrices) {
  for (const PeftMatrix& matrix : matrices) {
    for (const float value :
         buffer.subspan(matrix.offset, matrix.rows * matrix.columns)) {
      if (std::isfinite(value)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor '", matrix.name, "' has a value that is not finite"));
    }
  }
  return absl::OkStatus();
}

// What a file's copy of a weight of the base model must be.
struct Copied {
  std::string base_name;
  std::vector<int64_t> shape;
};

// Returns, by their names in the file, the base model's weights that PEFT may
// copy into it: those of the head and the embedding, and the base_layer of
// every linear layer with LoRA.
absl::flat_hash_map<std::string, Copied> PossibleCopies(
    const AdapterLayout& layout, const ModelShape& shape) {
  absl::flat_hash_map<std::string, Copied> copies;
  const auto add = [&](const LoraFactor& factor, absl::string_view suffix,
                       std::vector<int64_t> widths) {
    const std::string path = ModulePath(factor, shape.experts);
    copies[absl::StrCat(kPeftPrefix, ".", PathInFile(path, shape.names),
                        suffix)] = {absl::StrCat(path, ".weight"),
                                    std::move(widths)};
  };
  for (const TargetModule module :
       {TargetModule::kLmHead, TargetModule::kEmbedTokens}) {
    add({.module = module}, ".weight", {shape.vocab, shape.hidden});
  }
  for (const LoraFactor& factor : layout.factors()) {
    const bool embeds = factor.module == TargetModule::kEmbedTokens;
    add(factor, ".base_layer.weight",
        embeds ? std::vector<int64_t>{shape.vocab, shape.hidden}
               : std::vector<int64_t>{factor.out, factor.in});
  }
  return copies;
}

// Returns the file's copies of the base model's weights. Refuses other tensors
// that are not in the layout. Also refuses a copy with another shape, which
// belongs to another model.
absl::StatusOr<std::vector<BaseCopy>> FindCopies(
    const TensorMap& tensors, const AdapterLayout& layout,
    const ModelShape& shape, const std::vector<PeftMatrix>& matrices) {
  absl::flat_hash_set<absl::string_view> known;
  for (const PeftMatrix& matrix : matrices) known.insert(matrix.name);
  const auto possible = PossibleCopies(layout, shape);
  std::vector<BaseCopy> copies;
  for (const auto& [name, view] : tensors) {
    if (known.contains(name)) continue;
    const auto copy = possible.find(name);
    if (copy == possible.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", name,
                       "' belongs to no module that target_modules names and "
                       "that LoRA adapts here"));
    }
    if (view.shape != copy->second.shape) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor '", name, "' has shape ", weights::ShapeString(view.shape),
          "; the base model's ", weights::ShapeString(copy->second.shape)));
    }
    copies.push_back(
        {.name = name, .base_name = copy->second.base_name, .view = view});
  }
  return copies;
}

// Returns A and B of each factor, with their names in the file.
std::vector<PeftMatrix> FileMatrices(const AdapterLayout& layout,
                                     const ModelShape& shape, ExpertForm form) {
  std::vector<PeftMatrix> matrices =
      MatricesOf(layout, shape.experts, kPeftPrefix, form);
  for (PeftMatrix& matrix : matrices) {
    matrix.name = absl::StrCat(
        kPeftPrefix, ".",
        PathInFile(matrix.name.substr(kPeftPrefix.size() + 1), shape.names));
  }
  return matrices;
}

absl::StatusOr<const std::string*> FindFile(const PeftFiles& files,
                                            absl::string_view name) {
  const std::string* found = nullptr;
  for (const auto& [file_name, contents] : files) {
    if (file_name != name) continue;
    if (found != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("file ", name, " is there twice"));
    }
    found = &contents;
  }
  if (found == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("file ", name, " is missing"));
  }
  return found;
}

// Returns the layout's config, but with half the rank and half the alpha for
// gate and up of experts. So their scale stays the same.
LoraConfig WithHalves(const AdapterLayout& layout) {
  LoraConfig config = layout.config();
  for (const LoraFactor& factor : layout.factors()) {
    if (factor.expert != 0 || factor.module == TargetModule::kDownProj) {
      continue;
    }
    LoraShape half = config.ShapeOf(factor.layer, factor.module);
    half.rank /= 2;
    half.alpha /= 2;
    std::erase_if(config.overrides, [&](const LoraOverride& other) {
      return other.layer == factor.layer && other.module == factor.module;
    });
    config.overrides.push_back(
        {.layer = factor.layer, .module = factor.module, .shape = half});
  }
  std::ranges::sort(config.overrides, {}, [](const LoraOverride& other) {
    return std::pair(other.layer, other.module);
  });
  return config;
}

// Returns the weights of a file, in the layout of `config`. If the file has
// ExpertForm::kHalves, first halves the rank of the experts' gate and up in
// `config`.
absl::StatusOr<std::vector<float>> ReadPeftTensors(const TensorMap& tensors,
                                                   const ModelShape& shape,
                                                   const std::string& model_dir,
                                                   LoraConfig& config) {
  const AdapterLayout in_file(shape, config);
  WEFT_ASSIGN_OR_RETURN(const ExpertForm form,
                        FormOf(tensors, in_file, shape.experts, kPeftPrefix));
  if (form == ExpertForm::kHalves) config = WithHalves(in_file);
  const AdapterLayout layout(shape, config);
  const std::vector<PeftMatrix> matrices = FileMatrices(layout, shape, form);
  WEFT_ASSIGN_OR_RETURN(const std::vector<BaseCopy> copies,
                        FindCopies(tensors, layout, shape, matrices));
  WEFT_ASSIGN_OR_RETURN(std::vector<float> buffer,
                        Gather(tensors, layout.num_parameters(), matrices));
  WEFT_RETURN_IF_ERROR(CheckFinite(buffer, matrices));
  if (!model_dir.empty()) {
    WEFT_RETURN_IF_ERROR(CheckCopies(copies, model_dir));
  }
  return buffer;
}

NamedTensor ViewOf(const std::string& name, int64_t rows, int64_t columns,
                   absl::Span<const float> values) {
  return {.name = name,
          .view = {.dtype = ScalarType::kF32,
                   .shape = {rows, columns},
                   .bytes = absl::MakeConstSpan(
                       reinterpret_cast<const std::byte*>(values.data()),
                       values.size() * sizeof(float))}};
}

void AppendTensors(const std::vector<PeftMatrix>& matrices,
                   absl::Span<const float> values,
                   std::vector<NamedTensor>& tensors) {
  for (const PeftMatrix& matrix : matrices) {
    tensors.push_back(
        ViewOf(matrix.name, matrix.rows, matrix.columns,
               values.subspan(matrix.offset, matrix.rows * matrix.columns)));
  }
}

}  // namespace

absl::StatusOr<PeftAdapter> ReadPeft(const PeftFiles& files,
                                     const ModelShape& model,
                                     const std::string& model_dir) {
  WEFT_ASSIGN_OR_RETURN(const std::string* config_text,
                        FindFile(files, kPeftConfigFile));
  WEFT_ASSIGN_OR_RETURN(const std::string* tensor_bytes,
                        FindFile(files, kTensorFile));
  PeftAdapter adapter;
  absl::StatusOr<TensorMap> tensors = weights::ParseSafetensors(*tensor_bytes);
  ModelShape shape = model;
  if (tensors.ok() && model.names != DecoderNames::kPlain) {
    shape.names = NamesIn(*tensors, model.names);
    if (absl::Status images = DropImageParts(*tensors); !images.ok()) {
      tensors = images;
    }
  }
  WEFT_ASSIGN_OR_RETURN(adapter.config, ParsePeftConfig(*config_text, shape));
  absl::StatusOr<std::vector<float>> buffer =
      tensors.ok() ? ReadPeftTensors(*tensors, shape, model_dir, adapter.config)
                   : tensors.status();
  if (!buffer.ok()) {
    // Returns INVALID_ARGUMENT even for a file that is cut short, because a
    // client sent the file.
    return absl::InvalidArgumentError(
        absl::StrCat(kTensorFile, ": ", buffer.status().message()));
  }
  adapter.weights = *std::move(buffer);
  return adapter;
}

PeftFiles WritePeft(const LoraConfig& config, const ModelShape& shape,
                    absl::Span<const float> weights,
                    const std::string& base_model_name) {
  const AdapterLayout layout(shape, config);
  const bool is_fused = shape.experts.names == ExpertNames::kFused;
  const std::vector<PeftMatrix> matrices = FileMatrices(
      layout, shape, is_fused ? ExpertForm::kHalves : ExpertForm::kSingle);
  std::vector<PeftTensor> scattered;
  std::vector<NamedTensor> tensors;
  if (is_fused) {
    scattered = Scatter(weights, matrices);
    for (const PeftTensor& tensor : scattered) {
      tensors.push_back(
          ViewOf(tensor.name, tensor.rows, tensor.columns, tensor.values));
    }
  } else {
    AppendTensors(matrices, weights, tensors);
  }
  return {{std::string(kPeftConfigFile),
           WritePeftConfig(config, shape, base_model_name)},
          {std::string(kTensorFile), weft::weights::WriteSafetensors(tensors)}};
}

std::string WriteBuffers(const LoraConfig& config, const ModelShape& shape,
                         absl::Span<const NamedBuffer> buffers) {
  const AdapterLayout layout(shape, config);
  std::vector<NamedTensor> tensors;
  for (const NamedBuffer& buffer : buffers) {
    AppendTensors(MatricesOf(layout, shape.experts, buffer.name), buffer.values,
                  tensors);
  }
  return weights::WriteSafetensors(tensors);
}

absl::StatusOr<std::vector<float>> ReadBuffer(const std::string& safetensors,
                                              const std::string& buffer_name,
                                              const LoraConfig& config,
                                              const ModelShape& shape) {
  WEFT_ASSIGN_OR_RETURN(const TensorMap tensors,
                        weights::ParseSafetensors(safetensors));
  const AdapterLayout layout(shape, config);
  return Gather(tensors, layout.num_parameters(),
                MatricesOf(layout, shape.experts, buffer_name));
}

}  // namespace weft::lora
