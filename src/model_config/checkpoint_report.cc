#include "src/model_config/checkpoint_report.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "src/model_config/stored_weights.h"
#include "src/model_config/weight_list.h"
#include "src/weights/checkpoint.h"

namespace weft::model_config {
namespace {

using weights::Checkpoint;
using weights::DiskTensor;

// Names of the tensors that a server reads, as the files spell them.
using StoredNames = absl::flat_hash_set<std::string>;

void AddProblem(absl::string_view message, CheckpointReport& report) {
  for (ModelProblem& problem : report.problems) {
    if (problem.message != message) continue;
    ++problem.count;
    return;
  }
  report.problems.push_back({std::string(message), 1});
}

void CheckPart(const Checkpoint& checkpoint, const WeightEntry& entry,
               const StoredPart& part, StoredNames& read,
               CheckpointReport& report) {
  const absl::StatusOr<DiskTensor> found = checkpoint.Find(part.name);
  if (absl::IsNotFound(found.status())) {
    return AddProblem(
        absl::StrCat(weights::QuotedTensor(WithoutNumbers(part.name)),
                     " is not in the checkpoint"),
        report);
  }
  if (!found.ok()) return AddProblem(found.status().message(), report);
  read.insert(found->name());
  if (entry.slot == WeightSlot::kEmbedding || entry.slot == WeightSlot::kHead) {
    report.head_bytes += found->size_bytes();
  }
  const absl::Status stored =
      CheckStored(WithoutNumbers(part.name), part, *found);
  if (!stored.ok()) AddProblem(stored.message(), report);
}

void CheckEntry(const Checkpoint& checkpoint, const WeightEntry& entry,
                StoredNames& read, CheckpointReport& report) {
  for (const StoredPart& part : PartsOf(PlaceIn(checkpoint, entry))) {
    CheckPart(checkpoint, entry, part, read, report);
  }
}

void CheckTensors(const Checkpoint& checkpoint, StoredNames& read,
                  CheckpointReport& report) {
  for (const WeightEntry& entry : ListWeights(*report.config)) {
    CheckEntry(checkpoint, entry, read, report);
  }
  const absl::Status others = CheckNoOtherTensors(checkpoint, *report.config);
  if (!others.ok()) AddProblem(others.message(), report);
}

// Adds tensors to the groups and totals of a report.
class GroupList {
 public:
  explicit GroupList(CheckpointReport& report) : report_(report) {}

  void Add(const DiskTensor& tensor, bool is_read) {
    const std::string name = WithoutNumbers(tensor.name());
    const std::string key =
        absl::StrCat(name, "\n", weights::ScalarTypeName(tensor.dtype()),
                     weights::ShapeString(tensor.shape()), is_read);
    const auto [found, is_new] = index_.try_emplace(key, report_.groups.size());
    if (is_new) {
      report_.groups.push_back(
          {.name = name,
           .dtype = tensor.dtype(),
           .shape = {tensor.shape().begin(), tensor.shape().end()},
           .is_read = is_read});
    }
    TensorGroup& group = report_.groups[found->second];
    ++group.count;
    group.size_bytes += tensor.size_bytes();
    ++report_.num_tensors;
    report_.size_bytes += tensor.size_bytes();
    if (!is_read) return;
    ++report_.num_read_tensors;
    report_.read_bytes += tensor.size_bytes();
  }

 private:
  CheckpointReport& report_;
  absl::flat_hash_map<std::string, size_t> index_;
};

}  // namespace

std::string WithoutNumbers(absl::string_view name) {
  std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
  int64_t number = 0;
  for (absl::string_view& part : parts) {
    if (absl::SimpleAtoi(part, &number)) part = "*";
  }
  return absl::StrJoin(parts, ".");
}

CheckpointReport InspectCheckpoint(const std::string& model_dir) {
  CheckpointReport report;
  absl::StatusOr<ModelConfig> config = ReadModelConfig(model_dir);
  if (config.ok()) {
    report.config = *std::move(config);
  } else {
    AddProblem(config.status().message(), report);
  }
  const auto checkpoint = Checkpoint::Open(model_dir);
  if (!checkpoint.ok()) {
    AddProblem(checkpoint.status().message(), report);
    return report;
  }
  StoredNames read;
  if (report.config.has_value()) CheckTensors(**checkpoint, read, report);
  report.num_files = static_cast<int64_t>((*checkpoint)->files().size());
  GroupList groups(report);
  for (const DiskTensor& tensor : (*checkpoint)->Tensors()) {
    groups.Add(tensor, read.contains(tensor.name()));
  }
  return report;
}

}  // namespace weft::model_config
