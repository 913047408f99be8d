#include "src/model_config/stored_weights.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/weights/tensor_types.h"

namespace weft::model {
namespace {

// Returns the layer's number in a name such as
// "model.layers.3.mlp.up_proj.weight".
int64_t LayerOf(absl::string_view name) {
  int64_t layer = 0;
  constexpr absl::string_view kPrefix = "model.layers.";
  const std::vector<absl::string_view> parts =
      absl::StrSplit(name.substr(kPrefix.size()), absl::MaxSplits('.', 1));
  return absl::SimpleAtoi(parts[0], &layer) ? layer : -1;
}

}  // namespace

StoredPlace PlaceIn(const weights::Checkpoint& checkpoint,
                    const WeightEntry& entry) {
  if (!entry.fused.name.empty() && checkpoint.Find(entry.fused.name).ok()) {
    return entry.fused;
  }
  return {.name = entry.name, .shape = entry.shape};
}

absl::Status CheckStored(absl::string_view name,
                         absl::Span<const int64_t> shape,
                         const weights::DiskTensor& stored) {
  const std::string quoted = weights::QuotedTensor(name);
  if (!std::ranges::equal(stored.shape(), shape)) {
    return absl::InvalidArgumentError(absl::StrCat(
        quoted, " has shape ", weights::ShapeString(stored.shape()),
        "; expected ", weights::ShapeString(shape)));
  }
  const weights::ScalarType dtype = stored.dtype();
  if (dtype != weights::ScalarType::kF32 &&
      dtype != weights::ScalarType::kF16 &&
      dtype != weights::ScalarType::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat(quoted, " has dtype ", weights::ScalarTypeName(dtype),
                     "; F32, F16 or BF16 is expected"));
  }
  if (!stored.is_row_major()) {
    return absl::InvalidArgumentError(absl::StrCat(
        quoted, " is not stored row by row; save it contiguous()"));
  }
  return absl::OkStatus();
}

absl::Status CheckNoOtherTensors(const weights::Checkpoint& checkpoint,
                                 const ModelConfig& config) {
  const auto refuse = [&](const std::string& name) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights::QuotedTensor(name), " has no place in a ",
                     config.model_type, " as config.json describes it"));
  };
  absl::flat_hash_set<std::string> known;
  for (const WeightEntry& entry : ListWeights(config)) {
    known.insert(PlaceIn(checkpoint, entry).name);
  }
  for (const char* name : {"model.norm.bias", "lm_head.bias"}) {
    const auto bias = checkpoint.Find(name);
    if (bias.ok()) return refuse(bias->name());
  }
  for (const weights::DiskTensor& stored : checkpoint.Tensors()) {
    const std::string name =
        weights::Checkpoint::LayerTensorName(stored.name());
    if (name.empty() || known.contains(name)) continue;
    // Accepts tables that old releases saved, and layers that remain of a
    // longer model.
    if (absl::EndsWith(name, ".rotary_emb.inv_freq") ||
        LayerOf(name) >= config.num_layers) {
      continue;
    }
    return refuse(stored.name());
  }
  return absl::OkStatus();
}

}  // namespace weft::model
