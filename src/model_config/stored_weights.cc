#include "src/model_config/stored_weights.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/weights/float_convert.h"
#include "src/weights/tensor_types.h"

namespace weft::model_config {
namespace {

// The suffixes of the names of the two tensors that store an MXFP4 matrix.
constexpr absl::string_view kBlocks = "_blocks";
constexpr absl::string_view kScales = "_scales";

// Returns the layer's number in a name such as
// "model.layers.3.mlp.up_proj.weight", or -1 if there is no number.
int64_t LayerOf(absl::string_view name) {
  int64_t layer = 0;
  constexpr absl::string_view kPrefix = "model.layers.";
  const std::vector<absl::string_view> parts =
      absl::StrSplit(name.substr(kPrefix.size()), absl::MaxSplits('.', 1));
  return absl::SimpleAtoi(parts[0], &layer) ? layer : -1;
}

// Returns whether a checkpoint has the matrices of an entry's experts
// transposed. transformers, too, tells both forms apart by their shapes.
bool IsTransposed(const weights::DiskTensor& stored, const WeightEntry& entry) {
  const std::vector<int64_t>& shape = entry.fused.shape;
  return shape.size() == 3 && shape[1] != shape[2] &&
         std::ranges::equal(stored.shape(),
                            std::vector{shape[0], shape[2], shape[1]});
}

// Returns the place of kRows in the tensor with transposed matrices.
StoredPlace Transposed(StoredPlace place) {
  place.first_row -= place.expert * place.shape[1];
  place.form = StoredForm::kTransposed;
  std::swap(place.shape[1], place.shape[2]);
  return place;
}

}  // namespace

StoredPlace PlaceIn(const weights::Checkpoint& checkpoint,
                    const WeightEntry& entry) {
  if (entry.fused.name.empty()) {
    return {.name = entry.name, .shape = entry.shape};
  }
  if (entry.fused.form == StoredForm::kRows) {
    const auto stored = checkpoint.Find(entry.fused.name);
    if (entry.fused.is_only && stored.ok() && IsTransposed(*stored, entry)) {
      return Transposed(entry.fused);
    }
    if (entry.fused.is_only || stored.ok()) return entry.fused;
    return {.name = entry.name, .shape = entry.shape};
  }
  StoredPlace place = entry.fused;
  if (checkpoint.Find(absl::StrCat(place.name, kBlocks)).ok()) {
    // Turns the shape [experts, columns, rows] into that of the scales,
    // [experts, rows, columns / 32].
    place.form = StoredForm::kMxfp4;
    place.shape = {place.shape[0], place.shape[2],
                   place.shape[1] / weights::kMxfp4Block};
  }
  return place;
}

std::vector<StoredPart> PartsOf(const StoredPlace& place) {
  if (place.form != StoredForm::kMxfp4) {
    return {{.name = place.name, .shape = place.shape}};
  }
  std::vector<int64_t> blocks = place.shape;
  blocks.push_back(weights::kMxfp4Block / 2);
  return {{.name = absl::StrCat(place.name, kBlocks),
           .shape = std::move(blocks),
           .is_bytes = true},
          {.name = absl::StrCat(place.name, kScales),
           .shape = place.shape,
           .is_bytes = true}};
}

absl::Status CheckStored(absl::string_view name, const StoredPart& part,
                         const weights::DiskTensor& stored) {
  const std::string quoted = weights::QuotedTensor(name);
  if (!std::ranges::equal(stored.shape(), part.shape)) {
    return absl::InvalidArgumentError(absl::StrCat(
        quoted, " has shape ", weights::ShapeString(stored.shape()),
        "; expected ", weights::ShapeString(part.shape)));
  }
  const weights::ScalarType dtype = stored.dtype();
  const bool is_float = dtype == weights::ScalarType::kF32 ||
                        dtype == weights::ScalarType::kF16 ||
                        dtype == weights::ScalarType::kBf16;
  if (part.is_bytes ? dtype != weights::ScalarType::kU8 : !is_float) {
    return absl::InvalidArgumentError(absl::StrCat(
        quoted, " has dtype ", weights::ScalarTypeName(dtype), "; ",
        part.is_bytes ? "U8" : "F32, F16 or BF16", " is expected"));
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
    for (StoredPart& part : PartsOf(PlaceIn(checkpoint, entry))) {
      known.insert(std::move(part.name));
    }
  }
  for (const char* name : {"model.norm.bias", "lm_head.bias"}) {
    const auto bias = checkpoint.Find(name);
    if (bias.ok()) return refuse(bias->name());
  }
  for (const weights::DiskTensor& stored : checkpoint.Tensors()) {
    const std::string name =
        weights::Checkpoint::LayerTensorName(stored.name());
    if (name.empty() || known.contains(name)) continue;
    // Accepts rotary tables, which old releases saved. Also accepts layers
    // beyond num_layers, which files of a shortened model may still have.
    if (absl::EndsWith(name, ".rotary_emb.inv_freq") ||
        LayerOf(name) >= config.num_layers) {
      continue;
    }
    return refuse(stored.name());
  }
  return absl::OkStatus();
}

}  // namespace weft::model_config
