#include "src/peft/peft_format.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"
#include "src/peft/peft_config.h"
#include "src/peft/peft_fields.h"
#include "src/peft/peft_matrices.h"
#include "src/weights/safetensors.h"

namespace weft::lora {
namespace {

using weights::NamedTensor;
using weights::ScalarType;
using weights::TensorMap;
using weights::TensorView;

constexpr absl::string_view kTensorFile = "adapter_model.safetensors";
constexpr absl::string_view kPeftPrefix = "base_model.model";

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

// Returns names and shapes of the base model's weights that PEFT may copy into
// the file: those of the head and the embedding, and the base_layer of every
// linear layer with LoRA.
absl::flat_hash_map<std::string, std::vector<int64_t>> BaseCopies(
    const AdapterLayout& layout, const ModelShape& shape) {
  const std::vector<int64_t> vocabulary = {shape.vocab, shape.hidden};
  absl::flat_hash_map<std::string, std::vector<int64_t>> copies;
  for (const TargetModule module :
       {TargetModule::kLmHead, TargetModule::kEmbedTokens}) {
    copies[absl::StrCat(kPeftPrefix, ".", ModulePath({.module = module}),
                        ".weight")] = vocabulary;
  }
  for (const LoraFactor& factor : layout.factors()) {
    const bool embeds = factor.module == TargetModule::kEmbedTokens;
    copies[absl::StrCat(kPeftPrefix, ".", ModulePath(factor, shape.experts),
                        ".base_layer.weight")] =
        embeds ? vocabulary : std::vector<int64_t>{factor.out, factor.in};
  }
  return copies;
}

// Refuses tensors that are neither in the layout nor copies of the base model's
// weights. Also refuses a copy with another shape, which belongs to another
// model.
absl::Status CheckNothingElse(const TensorMap& tensors,
                              const AdapterLayout& layout,
                              const ModelShape& shape,
                              const std::vector<PeftMatrix>& matrices) {
  absl::flat_hash_set<absl::string_view> known;
  for (const PeftMatrix& matrix : matrices) known.insert(matrix.name);
  const auto copies = BaseCopies(layout, shape);
  for (const auto& [name, view] : tensors) {
    if (known.contains(name)) continue;
    const auto copy = copies.find(name);
    if (copy == copies.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", name,
                       "' belongs to no module that target_modules names"));
    }
    if (view.shape != copy->second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor '", name, "' has shape ", weights::ShapeString(view.shape),
          "; the base model's ", weights::ShapeString(copy->second)));
    }
  }
  return absl::OkStatus();
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
absl::StatusOr<std::vector<float>> ReadPeftTensors(const std::string& contents,
                                                   const ModelShape& shape,
                                                   LoraConfig& config) {
  WEFT_ASSIGN_OR_RETURN(const TensorMap tensors,
                        weights::ParseSafetensors(contents));
  const AdapterLayout in_file(shape, config);
  WEFT_ASSIGN_OR_RETURN(const ExpertForm form,
                        FormOf(tensors, in_file, shape.experts, kPeftPrefix));
  if (form == ExpertForm::kHalves) config = WithHalves(in_file);
  const AdapterLayout layout(shape, config);
  const std::vector<PeftMatrix> matrices =
      MatricesOf(layout, shape.experts, kPeftPrefix, form);
  WEFT_RETURN_IF_ERROR(CheckNothingElse(tensors, layout, shape, matrices));
  WEFT_ASSIGN_OR_RETURN(std::vector<float> buffer,
                        Gather(tensors, layout.num_parameters(), matrices));
  WEFT_RETURN_IF_ERROR(CheckFinite(buffer, matrices));
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
                                     const ModelShape& shape) {
  WEFT_ASSIGN_OR_RETURN(const std::string* config_text,
                        FindFile(files, kPeftConfigFile));
  WEFT_ASSIGN_OR_RETURN(const std::string* tensor_bytes,
                        FindFile(files, kTensorFile));
  PeftAdapter adapter;
  WEFT_ASSIGN_OR_RETURN(adapter.config, ParsePeftConfig(*config_text, shape));
  auto buffer = ReadPeftTensors(*tensor_bytes, shape, adapter.config);
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
  const std::vector<PeftMatrix> matrices =
      MatricesOf(layout, shape.experts, kPeftPrefix,
                 is_fused ? ExpertForm::kHalves : ExpertForm::kSingle);
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
