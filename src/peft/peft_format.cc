#include "src/peft/peft_format.h"

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

// Refuses an adapter with NaN or infinity, which would waste its owner's steps.
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

// Returns names and shapes of the frozen weights that PEFT may copy beside the
// factors: those of adapted heads and embeddings and, with
// save_embedding_layers, those of the base model's head and embedding.
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
// weights. Skips copies, but a copy with another shape belongs to another model
// and is refused.
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

absl::StatusOr<std::vector<float>> ReadPeftTensors(const std::string& contents,
                                                   const LoraConfig& config,
                                                   const ModelShape& shape) {
  WEFT_ASSIGN_OR_RETURN(const TensorMap tensors,
                        weights::ParseSafetensors(contents));
  const AdapterLayout layout(shape, config);
  const std::vector<PeftMatrix> matrices =
      MatricesOf(layout, shape.experts, kPeftPrefix, &tensors);
  WEFT_RETURN_IF_ERROR(CheckNothingElse(tensors, layout, shape, matrices));
  WEFT_ASSIGN_OR_RETURN(std::vector<float> buffer,
                        Gather(tensors, layout.num_parameters(), matrices));
  WEFT_RETURN_IF_ERROR(CheckFinite(buffer, matrices));
  return buffer;
}

void AppendTensors(const std::vector<PeftMatrix>& matrices,
                   absl::Span<const float> values,
                   std::vector<NamedTensor>& tensors) {
  for (const PeftMatrix& matrix : matrices) {
    const absl::Span<const float> part =
        values.subspan(matrix.offset, matrix.rows * matrix.columns);
    tensors.push_back(
        {.name = matrix.name,
         .view = {.dtype = ScalarType::kF32,
                  .shape = {matrix.rows, matrix.columns},
                  .bytes = absl::MakeConstSpan(
                      reinterpret_cast<const std::byte*>(part.data()),
                      part.size() * sizeof(float))}});
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
  auto buffer = ReadPeftTensors(*tensor_bytes, adapter.config, shape);
  if (!buffer.ok()) {
    // A client sent the truncated file, so it is an invalid argument and no
    // data loss of the server.
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
  std::vector<NamedTensor> tensors;
  AppendTensors(MatricesOf(layout, shape.experts, kPeftPrefix), weights,
                tensors);
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
