#include "src/model/checkpoint_report.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "src/model/weight_list.h"
#include "src/weights/checkpoint.h"

namespace weft::model {
namespace {

using weights::Checkpoint;
using weights::DiskTensor;

// "model.layers.3.mlp.up_proj.weight" to "model.layers.*.mlp.up_proj.weight".
std::string WithoutNumbers(absl::string_view name) {
  std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
  int64_t number = 0;
  for (absl::string_view& part : parts) {
    if (absl::SimpleAtoi(part, &number)) part = "*";
  }
  return absl::StrJoin(parts, ".");
}

// Names, as in the files, of the tensors that a daemon reads.
using StoredNames = absl::flat_hash_set<std::string>;

bool IsReadable(weights::ScalarType dtype) {
  return dtype == weights::ScalarType::kF32 ||
         dtype == weights::ScalarType::kF16 ||
         dtype == weights::ScalarType::kBf16;
}

void CheckEntry(const Checkpoint& checkpoint, const WeightEntry& entry,
                StoredNames& read, CheckpointReport& report) {
  const absl::StatusOr<DiskTensor> found = checkpoint.Find(entry.name);
  if (!found.ok()) {
    report.problems.emplace_back(found.status().message());
    return;
  }
  read.insert(found->name());
  if (entry.slot == WeightSlot::kEmbedding || entry.slot == WeightSlot::kHead) {
    report.head_bytes += found->size_bytes();
  }
  if (!std::ranges::equal(found->shape(), entry.shape)) {
    report.problems.push_back(
        absl::StrCat(weights::QuotedTensor(found->name()), " has shape ",
                     weights::ShapeString(found->shape()), "; expected ",
                     weights::ShapeString(entry.shape)));
  }
  if (!IsReadable(found->dtype())) {
    report.problems.push_back(
        absl::StrCat(weights::QuotedTensor(found->name()), " has dtype ",
                     weights::ScalarTypeName(found->dtype()),
                     "; F32, F16 or BF16 is expected"));
  }
}

void CheckTensors(const Checkpoint& checkpoint, StoredNames& read,
                  CheckpointReport& report) {
  for (const WeightEntry& entry : ListWeights(*report.config)) {
    CheckEntry(checkpoint, entry, read, report);
  }
  const absl::Status others =
      CheckNoOtherLayerTensors(checkpoint, *report.config);
  if (!others.ok()) report.problems.emplace_back(others.message());
}

void AddTensor(const DiskTensor& tensor, bool is_read,
               CheckpointReport& report) {
  TensorGroup group{.name = WithoutNumbers(tensor.name()),
                    .dtype = tensor.dtype(),
                    .shape = {tensor.shape().begin(), tensor.shape().end()},
                    .is_read = is_read};
  const auto same = [&](const TensorGroup& other) {
    return other.name == group.name && other.dtype == group.dtype &&
           other.shape == group.shape && other.is_read == group.is_read;
  };
  auto found = std::ranges::find_if(report.groups, same);
  if (found == report.groups.end()) {
    found = report.groups.insert(found, std::move(group));
  }
  ++found->count;
  found->size_bytes += tensor.size_bytes();
  ++report.num_tensors;
  report.size_bytes += tensor.size_bytes();
  if (!is_read) return;
  ++report.num_read_tensors;
  report.read_bytes += tensor.size_bytes();
}

}  // namespace

CheckpointReport InspectCheckpoint(const std::string& model_dir) {
  CheckpointReport report;
  absl::StatusOr<ModelConfig> config = ReadModelConfig(model_dir);
  if (config.ok()) {
    report.config = *std::move(config);
  } else {
    report.problems.emplace_back(config.status().message());
  }
  const auto checkpoint = Checkpoint::Open(model_dir);
  if (!checkpoint.ok()) {
    report.problems.emplace_back(checkpoint.status().message());
    return report;
  }
  StoredNames read;
  if (report.config.has_value()) CheckTensors(**checkpoint, read, report);
  report.num_files = static_cast<int64_t>((*checkpoint)->files().size());
  for (const DiskTensor& tensor : (*checkpoint)->Tensors()) {
    AddTensor(tensor, read.contains(tensor.name()), report);
  }
  return report;
}

}  // namespace weft::model
