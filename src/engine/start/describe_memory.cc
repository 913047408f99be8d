// Checks what a start checks, and describes how StartEngine would divide a
// device's memory, which needs no device.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/model_fingerprint.h"
#include "src/engine/device/compute_guard.h"
#include "src/engine/engine.h"
#include "src/engine/start/load_rank.h"
#include "src/engine/start/memory_plan.h"
#include "src/log/folder/state_folder.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/model_shard.h"
#include "src/model_config/weight_list.h"
#include "src/weights/checkpoint.h"

namespace weft::engine {
namespace {

// Memory that CUDA takes in each process: context, kernels, handles.
constexpr int64_t kContextBytes = int64_t{640} << 20;

// Returns the model's bytes on the rank that holds the largest part.
int64_t ModelBytes(const ModelSizes& sizes, const EngineOptions& options) {
  int64_t weights = 0;
  for (int rank = 0; rank < sizes.tensor_size; ++rank) {
    const parallel::Shard shard{.rank = rank, .size = sizes.tensor_size};
    weights = std::max(
        weights, model_config::WeightBytes(sizes.config, sizes.element_bytes,
                                           shard, MatrixFormatOf(options)));
  }
  int64_t rotary = 0;  // Bytes of the cosines and sines of all positions.
  for (const std::vector<double>& frequencies : sizes.config.rope_tables) {
    rotary += 2 * kFloatBytes * options.max_context_tokens *
              static_cast<int64_t>(frequencies.size());
  }
  return weights + rotary;
}

class Table {
 public:
  void Row(absl::string_view part, int64_t bytes, absl::string_view purpose,
           absl::string_view limit) {
    Line(part, absl::StrCat(bytes),
         absl::StrFormat("%.2f",
                         static_cast<double>(bytes) / (int64_t{1} << 30)),
         limit, purpose);
  }
  void Line(absl::string_view part, absl::string_view bytes,
            absl::string_view gib, absl::string_view limit,
            absl::string_view purpose) {
    absl::StrAppendFormat(&text_, "%-15s  %13s  %7s  %-10s  %s\n", part, bytes,
                          gib, limit, purpose);
  }
  std::string text() && { return std::move(text_); }

 private:
  std::string text_;
};

std::string TableOf(const MemorySplit& split, const ModelSizes& sizes,
                    const EngineOptions& options, int64_t available) {
  Table table;
  table.Line("part", "bytes", "GiB", "limited by", "for");
  table.Row("model", split.model,
            absl::StrCat(sizes.config.num_parameters(), " parameters",
                         sizes.tensor_size > 1 ? ", a rank's part of them" : "",
                         ", rotary tables"),
            "");
  table.Row("activations", split.activations,
            absl::StrCat("micro-batches of ", split.batch_tokens, " tokens, ",
                         split.recomputed_layers, " of ",
                         sizes.config.num_layers, " layers recomputed"),
            NameOf(split.batch_limit));
  const CacheUnits units = CacheUnitsOf(sizes);
  const CacheCounts counts =
      CountsIn(units, split.cache, options.max_decode_sequences);
  const int64_t state_bytes = counts.states * units.state;
  table.Row(
      "keys and values", split.cache - state_bytes,
      absl::StrCat((split.cache - state_bytes) * kPageTokens / units.page,
                   " tokens for up to ", options.max_decode_sequences,
                   " sequences; the longest has ", options.max_context_tokens),
      NameOf(split.cache_limit));
  if (counts.states > 0) {
    table.Row("states", state_bytes,
              absl::StrCat(counts.states, " for sequences and cached prefixes"),
              NameOf(split.cache_limit));
  }
  table.Row("decode graphs", split.decode_graphs,
            absl::StrCat("up to ", options.max_decode_sequences, " sequences"),
            NameOf(split.graphs_limit));
  table.Row("adapters", split.adapters,
            absl::StrCat(split.num_adapters, "; one of rank ", options.max_rank,
                         " on every layer has ",
                         LargestAdapterBytes(sizes, options.max_rank)),
            NameOf(split.adapters_limit));
  table.Row("reserve", split.reserve, "workspaces, snapshots, fragmentation",
            "");
  if (available > split.Total()) {
    table.Row("not given away", available - split.Total(),
              "flags leave it to nobody", "");
  }
  table.Row("all", split.model + available,
            absl::StrCat("--device-memory-share ", options.device_memory_share),
            "");
  return std::move(table).text();
}

absl::Status CheckHeaders(const EngineOptions& options,
                          const model_config::ModelConfig& config) {
  if (options.load_format == LoadFormat::kDummy) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<weights::Checkpoint> checkpoint,
                        weights::Checkpoint::Open(options.model_dir));
  return model::CheckDecoderWeights(*checkpoint, config);
}

// Reads config.json and the headers of the weights. Errors: those of a start.
absl::StatusOr<model_config::ModelConfig> CheckModel(
    const EngineOptions& options) {
  WEFT_ASSIGN_OR_RETURN(model_config::ModelConfig config,
                        model_config::ReadModelConfig(options.model_dir));
  WEFT_RETURN_IF_ERROR(model_config::SetExpertParallelSize(
      options.expert_parallel_size, options.tensor_parallel_size, config));
  WEFT_RETURN_IF_ERROR(model_config::CheckTensorParallelSize(
      config, options.tensor_parallel_size));
  WEFT_RETURN_IF_ERROR(CheckHeaders(options, config));
  return config;
}

absl::StatusOr<std::string> Describe(EngineOptions options,
                                     int64_t device_bytes) {
  if (options.device == Device::kCpu) {
    return absl::InvalidArgumentError(
        "--device=cpu: only the memory of CUDA devices is shared out");
  }
  WEFT_RETURN_IF_ERROR(CheckCudaFormat(options));
  WEFT_ASSIGN_OR_RETURN(model_config::ModelConfig config, CheckModel(options));
  WEFT_ASSIGN_OR_RETURN(options.max_context_tokens,
                        ContextTokens(options, config));
  const ModelSizes sizes{
      .config = std::move(config),
      .tensor_size = options.tensor_parallel_size,
      .element_bytes = options.dtype == Dtype::kF32 ? kFloatBytes : 2};
  const int64_t model_bytes = ModelBytes(sizes, options);
  const auto share = static_cast<int64_t>(options.device_memory_share *
                                          static_cast<double>(device_bytes));
  const int64_t available = std::max<int64_t>(
      std::min(share, device_bytes - kContextBytes) - model_bytes, 0);
  WEFT_ASSIGN_OR_RETURN(MemorySplit split,
                        PlanMemory(sizes, available, &options));
  split.model = model_bytes;
  return TableOf(split, sizes, options, available);
}

// Returns the absolute path without parts such as "..", and without a slash at
// its end.
std::filesystem::path Cleaned(const std::string& path) {
  const auto clean = std::filesystem::absolute(path).lexically_normal();
  return clean.has_filename() ? clean : clean.parent_path();
}

// Returns whether a start could write to the folder, which it may have to make.
absl::Status CheckFolder(const char* flag, const std::string& path) {
  std::filesystem::path place = Cleaned(path);
  std::error_code error;
  while (!std::filesystem::exists(place, error) && place.has_relative_path()) {
    place = place.parent_path();
  }
  if (std::filesystem::is_directory(place, error) &&
      access(place.c_str(), W_OK | X_OK) == 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "--", flag, "=", path, " cannot be created or written: ", place.string(),
      " is not a folder in which this user may write"));
}

absl::Status CheckFolders(const EngineOptions& options) {
  WEFT_RETURN_IF_ERROR(CheckFolder("checkpoint-dir", options.checkpoint_dir));
  if (options.state_dir.empty()) return absl::OkStatus();
  // A start makes the checkpoint folder with its parents. Then it makes the
  // state folder, but no parent of it.
  const std::filesystem::path parent = Cleaned(options.state_dir).parent_path();
  const std::filesystem::path made =
      Cleaned(options.checkpoint_dir).lexically_relative(parent);
  const bool is_made = !made.empty() && *made.begin() != "..";
  std::error_code error;
  if (!is_made && !std::filesystem::is_directory(parent, error)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--state-dir=", options.state_dir, " cannot be created: make the ",
        "folder ", parent.string(), " first"));
  }
  return CheckFolder("state-dir", options.state_dir);
}

// Checks FORMAT of a state folder that is there.
absl::Status CheckState(const EngineOptions& options) {
  if (options.state_dir.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const std::string model, ModelFingerprint(options));
  return log::StateFolder::Check(options.state_dir, model,
                                 options.accept_base_model_change);
}

// Returns the device's index that the last local rank needs.
absl::StatusOr<int> CheckWorld(const EngineOptions& options) {
  const int size = options.tensor_parallel_size * options.data_parallel_size;
  // Like a start, a server of one rank ignores variables such as RANK.
  if (size == 1) return 0;
  WEFT_ASSIGN_OR_RETURN(const std::optional<World> given,
                        WorldFromEnvironment([](const std::string& name) {
                          const char* const value = std::getenv(name.c_str());
                          return value == nullptr
                                     ? std::nullopt
                                     : std::optional<std::string>(value);
                        }));
  if (!given) return size - 1;
  WEFT_RETURN_IF_ERROR(CheckWorldSize(*given, options.tensor_parallel_size,
                                      options.data_parallel_size));
  return given->local_rank;
}

absl::Status Check(const EngineOptions& options) {
  WEFT_RETURN_IF_ERROR(CheckFolders(options));
  WEFT_ASSIGN_OR_RETURN(const int local_rank, CheckWorld(options));
  WEFT_RETURN_IF_ERROR(CheckDevice(options, local_rank));
  WEFT_ASSIGN_OR_RETURN(const model_config::ModelConfig config,
                        CheckModel(options));
  WEFT_RETURN_IF_ERROR(ContextTokens(options, config).status());
  return CheckState(options);
}

}  // namespace
}  // namespace weft::engine

namespace weft::engine {

absl::Status CheckStart(const EngineOptions& options) {
  absl::Status status;
  WEFT_RETURN_IF_ERROR(engine::RunGuarded(
      "checking the start", [&] { status = engine::Check(options); }));
  return status;
}

absl::StatusOr<std::string> DescribeMemory(const EngineOptions& options,
                                           int64_t device_bytes) {
  absl::StatusOr<std::string> text = absl::InternalError("not run");
  WEFT_RETURN_IF_ERROR(engine::RunGuarded("sharing out the memory", [&] {
    text = engine::Describe(options, device_bytes);
  }));
  return text;
}

}  // namespace weft::engine
