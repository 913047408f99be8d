#include "src/lora/peft_format.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/loader_rules.h"
#include "src/lora/peft_config.h"
#include "src/lora/peft_matrices.h"
#include "src/weights/checkpoint.h"
#include "src/weights/float_convert.h"
#include "src/weights/safetensors.h"
#include "src/weights/tensor_types.h"

namespace weft::lora {
namespace {

using weights::TensorMap;

// The beginning of all names in a PEFT file.
constexpr absl::string_view kPeftPrefix = "base_model.model";

// Returns how the file spells the paths of the decoder's modules. Returns
// `usual` for a file without a tensor of the decoder.
model_config::DecoderNames NamesIn(const TensorMap& tensors,
                                   model_config::DecoderNames usual) {
  for (const model_config::DecoderNames names :
       {model_config::DecoderNames::kWrapped,
        model_config::DecoderNames::kOldWrapped,
        model_config::DecoderNames::kPlain}) {
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

// Removes LoRA of the parts that read images. PEFT adds it where target_modules
// has names such as q_proj, and training on text leaves its B at 0. Errors:
// INVALID_ARGUMENT, naming the tensor, if a B is not 0.
absl::Status DropImageParts(TensorMap& tensors) {
  for (auto it = tensors.begin(); it != tensors.end();) {
    const auto& [name, view] = *it;
    if (!absl::StrContains(name, ".vision_tower.") &&
        !absl::StrContains(name, ".visual.") &&
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

// A copy of one of the base model's weights in a PEFT file. PEFT saves the head
// and the embedding if the vocabulary was resized, and the base layer of an
// adapted head. When PEFT loads the adapter, it puts the copies in place of the
// base's weights. A server has one base for all adapters, so a copy must be
// equal.
struct BaseCopy {
  std::string name;       // In the PEFT file.
  std::string base_name;  // The canonical name in the model folder.
  weights::TensorView view;
};

using weights::DiskTensor;
using weights::ScalarType;

constexpr char kHead[] = "lm_head.weight";
constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr size_t kChunk = size_t{1} << 20;  // Elements.

// Returns the largest error of a value that was rounded to the nearest number
// of bf16 or f16. A model may have been loaded in such a dtype and its copies
// saved in a wider one, so the value says more than the copy's dtype.
float RoundingError(float copy, float base) {
  const uint32_t bits = std::bit_cast<uint32_t>(copy);
  if ((bits & 0xffff) == 0)
    return std::max(0x1p-8F * std::abs(base), 0x1p-134F);
  if ((bits & 0x1fff) == 0)
    return std::max(0x1p-11F * std::abs(base), 0x1p-25F);
  return 0;
}

absl::StatusOr<DiskTensor> FindBase(const weights::Checkpoint& checkpoint,
                                    const BaseCopy& copy) {
  absl::StatusOr<DiskTensor> found = checkpoint.Find(copy.base_name);
  if (absl::IsNotFound(found.status()) && copy.base_name == kHead) {
    found = checkpoint.Find(kEmbedding);
  }
  if (found.ok()) {
    if (absl::MakeConstSpan(copy.view.shape) == found->shape()) return found;
    return absl::InvalidArgumentError(absl::StrCat(
        weights::QuotedTensor(copy.name), " has shape ",
        weights::ShapeString(copy.view.shape), "; the base model's ",
        weights::ShapeString(found->shape())));
  }
  if (!absl::IsNotFound(found.status())) return found.status();
  return absl::InvalidArgumentError(absl::StrCat(
      weights::QuotedTensor(copy.name),
      " is a copy of a weight that the model folder does not have under this "
      "name, so it cannot be compared; remove it from the file"));
}

absl::Status Differs(const BaseCopy& copy, size_t row) {
  return absl::InvalidArgumentError(absl::StrCat(
      weights::QuotedTensor(copy.name), " differs from the base model's ",
      copy.base_name, ", first in row ", row,
      ". All adapters share one base model: put the changed rows into the "
      "model folder and serve that, or remove the tensor from the file to "
      "train on from the base's rows"));
}

absl::StatusOr<std::vector<float>> Floats(ScalarType dtype,
                                          absl::Span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / weights::ScalarTypeBytes(dtype));
  WEFT_RETURN_IF_ERROR(weights::CopyToFloats({.dtype = dtype, .bytes = bytes},
                                             absl::MakeSpan(values)));
  return values;
}

absl::Status CheckCopy(const BaseCopy& copy, const DiskTensor& base) {
  const size_t base_bytes = weights::ScalarTypeBytes(base.dtype());
  const size_t copy_bytes = weights::ScalarTypeBytes(copy.view.dtype);
  const size_t count = copy.view.num_elements();
  std::vector<std::byte> buffer;
  for (size_t first = 0; first < count; first += kChunk) {
    const size_t length = std::min(kChunk, count - first);
    buffer.resize(length * base_bytes);
    WEFT_RETURN_IF_ERROR(
        base.ReadBytes(first * base_bytes, absl::MakeSpan(buffer)));
    WEFT_ASSIGN_OR_RETURN(const std::vector<float> expected,
                          Floats(base.dtype(), buffer));
    WEFT_ASSIGN_OR_RETURN(
        const std::vector<float> actual,
        Floats(copy.view.dtype, copy.view.bytes.subspan(first * copy_bytes,
                                                        length * copy_bytes)));
    for (size_t i = 0; i < length; ++i) {
      // A NaN differs from everything.
      if (std::abs(actual[i] - expected[i]) <=
          RoundingError(actual[i], expected[i])) {
        continue;
      }
      return Differs(copy, (first + i) / copy.view.shape.back());
    }
  }
  return absl::OkStatus();
}

// Checks that each copy has the values of the folder's tensor, which may be
// rounded to bf16 or f16. A head that the folder lacks is its embedding. Reads
// the folder only if there is a copy. Errors: INVALID_ARGUMENT, which names the
// tensor and the first row that differs; those of weights::Checkpoint.
absl::Status CheckCopies(const std::vector<BaseCopy>& copies,
                         const std::string& model_dir) {
  if (copies.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<weights::Checkpoint> checkpoint,
                        weights::Checkpoint::Open(model_dir));
  for (const BaseCopy& copy : copies) {
    WEFT_ASSIGN_OR_RETURN(const DiskTensor base, FindBase(*checkpoint, copy));
    WEFT_RETURN_IF_ERROR(CheckCopy(copy, base));
  }
  return absl::OkStatus();
}

using weights::NamedTensor;

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
// every linear layer with LoRA that is a module of its own.
absl::flat_hash_map<std::string, Copied> PossibleCopies(
    const AdapterLayout& layout, const model_config::ModelShape& shape) {
  absl::flat_hash_map<std::string, Copied> copies;
  const auto add = [&](const LoraFactor& factor, absl::string_view suffix,
                       std::vector<int64_t> widths) {
    copies[absl::StrCat(kPeftPrefix, ".", FilePath(factor, shape), suffix)] = {
        absl::StrCat(ModulePath(factor, shape.experts), ".weight"),
        std::move(widths)};
  };
  for (const TargetModule module :
       {TargetModule::kLmHead, TargetModule::kEmbedTokens}) {
    add({.module = module}, ".weight", {shape.vocab, shape.hidden});
  }
  for (const LoraFactor& factor : layout.factors()) {
    if (NumFused(factor.module, shape) > 1) continue;
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
    const model_config::ModelShape& shape,
    const std::vector<PeftMatrix>& matrices) {
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
                                     const model_config::ModelShape& shape,
                                     FusedForm form) {
  std::vector<PeftMatrix> matrices =
      MatricesOf(layout, shape, kPeftPrefix, form);
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

// Returns the layout's config, but with a part of the rank and of the alpha for
// modules that a file with FusedForm::kParts has as one. So their scale stays
// the same.
LoraConfig WithParts(const AdapterLayout& layout,
                     const model_config::ModelShape& shape) {
  LoraConfig config = layout.config();
  for (const LoraFactor& factor : layout.factors()) {
    const bool is_expert = factor.expert != kNoExpert;
    const int parts = is_expert ? 2 : NumFused(factor.module, shape);
    if (parts == 1 || factor.expert > 0 ||
        (is_expert && factor.module == TargetModule::kDownProj)) {
      continue;
    }
    LoraShape part = config.ShapeOf(factor.layer, factor.module);
    part.rank /= parts;
    part.alpha /= parts;
    std::erase_if(config.overrides, [&](const LoraOverride& other) {
      return other.layer == factor.layer && other.module == factor.module;
    });
    config.overrides.push_back(
        {.layer = factor.layer, .module = factor.module, .shape = part});
  }
  std::ranges::sort(config.overrides, {}, [](const LoraOverride& other) {
    return std::pair(other.layer, other.module);
  });
  return config;
}

// Returns the weights of a file, in the layout of `config`. If the file has
// FusedForm::kParts, first divides the ranks of its parts in `config`.
// expected: see ReadPeft.
absl::StatusOr<std::vector<float>> ReadPeftTensors(
    const TensorMap& tensors, const model_config::ModelShape& shape,
    const std::string& model_dir, const LoraConfig* expected,
    LoraConfig& config) {
  const AdapterLayout in_file(shape, config);
  WEFT_ASSIGN_OR_RETURN(
      FusedForm form, FormOf(tensors, in_file, shape,
                             FileMatrices(in_file, shape, FusedForm::kFused)));
  if (form != FusedForm::kSingle) {
    LoraConfig parts = WithParts(in_file, shape);
    const bool is_expected =
        expected != nullptr && AdapterLayout(shape, parts).factors() ==
                                   AdapterLayout(shape, *expected).factors();
    if (is_expected) form = FusedForm::kParts;
    if (form == FusedForm::kParts) config = std::move(parts);
  }
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

// The tensors of a file to be written. The buffers with their values outlive
// the object.
class FileTensors {
 public:
  // Adds the tensors that hold the matrices of the buffer `values`. Copies only
  // matrices that the file does not have as the buffer has them.
  void Add(const std::vector<PeftMatrix>& matrices,
           absl::Span<const float> values) {
    std::vector<PeftMatrix> parts;
    for (const PeftMatrix& matrix : matrices) {
      if (!matrix.is_whole()) {
        parts.push_back(matrix);
        continue;
      }
      tensors_.push_back(
          ViewOf(matrix.name, matrix.rows, matrix.columns,
                 values.subspan(matrix.offset, matrix.rows * matrix.columns)));
    }
    for (PeftTensor& part : Scatter(values, parts)) {
      copies_.push_back(std::move(part));
      const PeftTensor& copy = copies_.back();
      tensors_.push_back(
          ViewOf(copy.name, copy.rows, copy.columns, copy.values));
    }
  }
  std::string Write() const { return weights::WriteSafetensors(tensors_); }

 private:
  std::deque<PeftTensor> copies_;  // Never moves its elements.
  std::vector<NamedTensor> tensors_;
};

}  // namespace

absl::StatusOr<PeftAdapter> ReadPeft(const PeftFiles& files,
                                     const model_config::ModelShape& model,
                                     const std::string& model_dir,
                                     const LoraConfig* expected) {
  WEFT_ASSIGN_OR_RETURN(const std::string* config_text,
                        FindFile(files, kPeftConfigFile));
  WEFT_ASSIGN_OR_RETURN(const std::string* tensor_bytes,
                        FindFile(files, kTensorFile));
  PeftAdapter adapter;
  absl::StatusOr<TensorMap> tensors = weights::ParseSafetensors(*tensor_bytes);
  model_config::ModelShape shape = model;
  if (tensors.ok()) {
    shape.names = NamesIn(*tensors, model.names);
    if (absl::Status images = DropImageParts(*tensors); !images.ok()) {
      tensors = images;
    }
  }
  WEFT_ASSIGN_OR_RETURN(adapter.config, ParsePeftConfig(*config_text, shape));
  absl::StatusOr<std::vector<float>> buffer =
      tensors.ok() ? ReadPeftTensors(*tensors, shape, model_dir, expected,
                                     adapter.config)
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

PeftFiles WritePeft(const LoraConfig& config,
                    const model_config::ModelShape& model,
                    absl::Span<const float> weights,
                    const std::string& base_model_name,
                    std::optional<Loader> loader) {
  const FileRules rules = RulesOf(loader, model);
  model_config::ModelShape shape = model;
  shape.names = rules.names;
  const AdapterLayout layout(shape, config);
  std::vector<PeftMatrix> matrices = FileMatrices(layout, shape, rules.form);
  LoraConfig written = config;
  std::vector<float> scaled;
  if (rules.one_scale) {
    written = WithOneScale(config);
    scaled = ScaledWeights(layout, weights);
    weights = scaled;
  }
  if (rules.one_rank) {
    const double scale = written.alpha / written.rank;
    written.rank = PadToOneRank(matrices);
    written.alpha = scale * written.rank;
  }
  FileTensors tensors;
  tensors.Add(matrices, weights);
  return {{std::string(kPeftConfigFile),
           WritePeftConfig(written, shape, rules, base_model_name)},
          {std::string(kTensorFile), tensors.Write()}};
}

std::string WriteBuffers(const LoraConfig& config,
                         const model_config::ModelShape& shape,
                         absl::Span<const NamedBuffer> buffers) {
  const AdapterLayout layout(shape, config);
  FileTensors tensors;
  for (const NamedBuffer& buffer : buffers) {
    tensors.Add(MatricesOf(layout, shape, buffer.name), buffer.values);
  }
  return tensors.Write();
}

absl::StatusOr<std::vector<float>> ReadBuffer(
    const std::string& safetensors, const std::string& buffer_name,
    const LoraConfig& config, const model_config::ModelShape& shape) {
  WEFT_ASSIGN_OR_RETURN(const TensorMap tensors,
                        weights::ParseSafetensors(safetensors));
  const AdapterLayout layout(shape, config);
  return Gather(tensors, layout.num_parameters(),
                MatricesOf(layout, shape, buffer_name));
}

}  // namespace weft::lora
