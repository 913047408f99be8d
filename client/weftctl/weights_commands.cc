// Commands that read model folders. They need no server, GPU or Torch.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "src/base/observe/progress.h"
#include "src/base/status_macros.h"
#include "src/model_config/checkpoint_report.h"
#include "src/model_config/stored_weights.h"
#include "src/model_config/weight_list.h"
#include "src/weights/checkpoint.h"
#include "src/weights/strict_json.h"
#include "src/weights/tensor_copy.h"

namespace weft::client::weftctl {
namespace {

using model_config::CheckpointReport;
using Json = nlohmann::ordered_json;

constexpr size_t kMaxConfigBytes = size_t{16} << 20;

Json ToJson(const CheckpointReport& report) {
  Json root;
  if (report.config.has_value()) {
    const model_config::ModelConfig& config = *report.config;
    root["model_type"] = config.model_type;
    root["num_layers"] = config.num_layers;
    root["hidden_size"] = config.hidden;
    root["vocab_size"] = config.vocab;
    root["tied_embeddings"] = config.tied_embeddings;
    root["num_parameters"] = config.num_parameters();
  }
  root["num_files"] = report.num_files;
  root["num_tensors"] = report.num_tensors;
  root["size_bytes"] = report.size_bytes;
  root["num_read_tensors"] = report.num_read_tensors;
  root["read_bytes"] = report.read_bytes;
  root["head_bytes"] = report.head_bytes;
  root["tensors"] = Json::array();
  for (const model_config::TensorGroup& group : report.groups) {
    root["tensors"].push_back({{"name", group.name},
                               {"dtype", weights::ScalarTypeName(group.dtype)},
                               {"shape", group.shape},
                               {"count", group.count},
                               {"size_bytes", group.size_bytes},
                               {"read", group.is_read}});
  }
  root["problems"] = Json::array();
  for (const auto& [message, count] : report.problems) {
    root["problems"].push_back({{"message", message}, {"count", count}});
  }
  return root;
}

std::string Amount(int64_t count, uint64_t bytes) {
  return absl::StrCat(count, " tensors, ", FormatBytes(bytes));
}

void PrintProblems(const CheckpointReport& report, std::ostream& out) {
  if (!report.problems.empty()) out << "\n";
  for (const auto& [message, count] : report.problems) {
    out << "unsupported: " << message;
    if (count > 1) out << " (" << count << " times)";
    out << "\n";
  }
}

void PrintReport(const CheckpointReport& report, std::ostream& out) {
  std::vector<Row> summary;
  if (report.config.has_value()) {
    const model_config::ModelConfig& config = *report.config;
    summary = {{"architecture", config.model_type},
               {"parameters", absl::StrCat(config.num_parameters())},
               {"layers", absl::StrCat(config.num_layers)},
               {"hidden size", absl::StrCat(config.hidden)},
               {"vocabulary", absl::StrCat(config.vocab)},
               {"head", config.tied_embeddings ? "the embedding" : "its own"}};
  }
  summary.push_back({"files", absl::StrCat(report.num_files)});
  summary.push_back({"in them", Amount(report.num_tensors, report.size_bytes)});
  summary.push_back(
      {"read", Amount(report.num_read_tensors, report.read_bytes)});
  summary.push_back({"for the head alone", FormatBytes(report.head_bytes)});
  PrintTable(summary, out);
  if (report.groups.empty()) return PrintProblems(report, out);
  std::vector<Row> rows = {
      {"TENSOR", "DTYPE", "SHAPE", "COUNT", "SIZE", "READ"}};
  for (const model_config::TensorGroup& group : report.groups) {
    rows.push_back({group.name, weights::ScalarTypeName(group.dtype),
                    weights::ShapeString(group.shape),
                    absl::StrCat(group.count), FormatBytes(group.size_bytes),
                    group.is_read ? "yes" : "no"});
  }
  out << "\n";
  PrintTable(rows, out);
  PrintProblems(report, out);
}

absl::Status Inspect(const Session& session) {
  const std::string& model_dir = session.arguments.word(0);
  const CheckpointReport report = model_config::InspectCheckpoint(model_dir);
  if (session.json) {
    // Replaces bytes that are not UTF-8, because paths may have any bytes.
    session.out << ToJson(report).dump(-1, ' ', /*ensure_ascii=*/false,
                                       Json::error_handler_t::replace)
                << "\n";
  } else {
    PrintReport(report, session.out);
  }
  if (report.problems.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      model_dir, " cannot be served: ", report.problems.front().message));
}

// Returns the tensors that `weights head` copies, under their canonical names:
// the embedding, and also the head if the head is not tied to the embedding.
absl::StatusOr<std::vector<weights::CopiedTensor>> HeadTensors(
    const weights::Checkpoint& checkpoint,
    const model_config::ModelConfig& config) {
  std::vector<weights::CopiedTensor> tensors;
  for (const model_config::WeightEntry& entry :
       model_config::ListHeadWeights(config)) {
    WEFT_ASSIGN_OR_RETURN(const auto source, checkpoint.Find(entry.name));
    WEFT_RETURN_IF_ERROR(
        model_config::CheckStored(entry.name, {.shape = entry.shape}, source));
    tensors.push_back({.name = entry.name, .source = source});
  }
  if (config.tied_embeddings) {
    const auto head = checkpoint.Find("lm_head.weight");
    if (head.ok()) tensors[0].twin = *head;
  }
  return tensors;
}

absl::Status CopyConfig(const std::string& from, const std::string& to) {
  WEFT_ASSIGN_OR_RETURN(const auto text, weights::ReadSmallFile(
                                             absl::StrCat(from, "/config.json"),
                                             kMaxConfigBytes));
  return weights::ReplaceFile(absl::StrCat(to, "/config.json"), text);
}

// Creates the folder for the copy. Errors: UsageError if --output is missing or
// is the model's folder; INVALID_ARGUMENT if the folder cannot be created.
absl::Status PrepareFolder(const std::string& model_dir,
                           const std::string& out_dir) {
  if (out_dir.empty()) return UsageError("-o DIR is missing");
  std::error_code error;
  std::filesystem::create_directories(out_dir, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat(out_dir, " cannot be created: ", error.message()));
  }
  if (std::filesystem::equivalent(model_dir, out_dir, error)) {
    return UsageError(absl::StrCat("-o ", out_dir, " is the model's folder"));
  }
  return absl::OkStatus();
}

absl::Status CopyHead(const std::vector<weights::CopiedTensor>& tensors,
                      const std::string& out_dir) {
  uint64_t bytes = 0;
  for (const weights::CopiedTensor& tensor : tensors) {
    bytes += tensor.source.size_bytes();
  }
  Progress progress("copying the head", static_cast<int64_t>(bytes), "B");
  return weights::CopyTensors(tensors,
                              absl::StrCat(out_dir, "/model.safetensors"),
                              [&](int64_t done) { progress.Add(done); });
}

absl::Status Head(const Session& session) {
  const std::string& model_dir = session.arguments.word(0);
  const std::string out_dir = session.arguments.GetString("output");
  WEFT_ASSIGN_OR_RETURN(const auto config,
                        model_config::ReadModelConfig(model_dir));
  WEFT_ASSIGN_OR_RETURN(const auto checkpoint,
                        weights::Checkpoint::Open(model_dir));
  WEFT_ASSIGN_OR_RETURN(const auto tensors, HeadTensors(*checkpoint, config));
  WEFT_RETURN_IF_ERROR(PrepareFolder(model_dir, out_dir));
  WEFT_RETURN_IF_ERROR(CopyHead(tensors, out_dir));
  WEFT_RETURN_IF_ERROR(CopyConfig(model_dir, out_dir));
  std::vector<Row> rows = {{"TENSOR", "DTYPE", "SHAPE", "SIZE"}};
  for (const weights::CopiedTensor& tensor : tensors) {
    rows.push_back({tensor.name, weights::ScalarTypeName(tensor.source.dtype()),
                    weights::ShapeString(tensor.source.shape()),
                    FormatBytes(tensor.source.size_bytes())});
  }
  PrintTable(rows, session.out);
  session.out << "\n"
              << checkpoint->bytes_read() << " bytes read, written to "
              << out_dir << "\n";
  return absl::OkStatus();
}

}  // namespace

std::vector<Command> WeightsCommands() {
  std::vector<Command> commands = {
      {"weights inspect",
       "What a model folder holds, what is read of it, what is unsupported.",
       Inspect,
       {"MODEL_DIR"}},
      {"weights head",
       "Copy embedding and head of a model, reading nothing else.",
       Head,
       {"MODEL_DIR"},
       {{"output", "DIR", "also -o; created when missing", ""}}}};
  for (Command& command : commands) command.offline = true;
  return commands;
}

}  // namespace weft::client::weftctl
