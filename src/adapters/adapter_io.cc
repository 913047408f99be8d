#include "src/adapters/adapter_io.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/files/durable_folder.h"
#include "src/peft/peft_format.h"

namespace weft::engine {
namespace {

using nlohmann::json;

constexpr int kFormatVersion = 1;
constexpr uint64_t kMaxStoredRank = 1 << 16;
constexpr uint64_t kMaxStoredLayer = 1 << 16;
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kStateFile = "trainer_state.json";

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() ||
          std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool SameState(const lora::AdapterState& a, const lora::AdapterState& b) {
  return a.optim_steps == b.optim_steps && SameBits(a.weights, b.weights) &&
         SameBits(a.gradient, b.gradient) && SameBits(a.moment1, b.moment1) &&
         SameBits(a.moment2, b.moment2);
}

// A checkpoint loads only into a model of the same shape.
json Fingerprint(const lora::ModelShape& shape) {
  json fingerprint = {{"num_layers", shape.num_layers},
                      {"hidden", shape.hidden},
                      {"q_width", shape.q_width},
                      {"kv_width", shape.kv_width},
                      {"ffn", shape.ffn},
                      {"vocab", shape.vocab}};
  const lora::ExpertShape& e = shape.experts;
  if (e.count > 0) fingerprint["experts"] = {e.count, e.ffn, e.shared_ffn};
  return fingerprint;
}

json ConfigToJson(const LoraConfig& config) {
  json modules = json::array();
  for (const TargetModule module : config.target_modules) {
    modules.push_back(static_cast<int>(module));
  }
  json overrides = json::array();
  for (const LoraOverride& other : config.overrides) {
    overrides.push_back({{"layer", other.layer},
                         {"module", static_cast<int>(other.module)},
                         {"rank", other.shape.rank},
                         {"alpha", other.shape.alpha}});
  }
  return {{"rank", config.rank},
          {"alpha", config.alpha},
          {"seed", config.seed},
          {"target_modules", std::move(modules)},
          {"overrides", std::move(overrides)}};
}

// Get returns false if the field is missing or has another type. The manifest
// has no checksum, so its fields can be damaged.
bool Get(const json& object, const char* key, std::string* value) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_string()) return false;
  *value = it->get<std::string>();
  return true;
}
bool Get(const json& object, const char* key, uint64_t* value) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number_unsigned()) return false;
  *value = it->get<uint64_t>();
  return true;
}
bool Get(const json& object, const char* key, double* value) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number()) return false;
  *value = it->get<double>();
  return true;
}

bool GetModule(const json& value, TargetModule* out) {
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() >= kAllTargetModules.size()) {
    return false;
  }
  *out = static_cast<TargetModule>(value.get<uint64_t>());
  return true;
}

bool GetOverride(const json& value, LoraOverride* out) {
  uint64_t layer = 0;
  uint64_t rank = 0;
  if (!value.is_object() || !Get(value, "layer", &layer) ||
      !Get(value, "rank", &rank) || !Get(value, "alpha", &out->shape.alpha) ||
      !value.contains("module") || !GetModule(value["module"], &out->module) ||
      layer > kMaxStoredLayer || rank > kMaxStoredRank) {
    return false;
  }
  out->layer = static_cast<int>(layer);
  out->shape.rank = static_cast<int>(rank);
  return true;
}

bool GetConfig(const json& config, LoraConfig* out) {
  uint64_t rank = 0;
  if (!config.is_object() || !Get(config, "rank", &rank) ||
      !Get(config, "alpha", &out->alpha) || !Get(config, "seed", &out->seed)) {
    return false;
  }
  const auto modules = config.find("target_modules");
  if (rank < 1 || rank > kMaxStoredRank || modules == config.end() ||
      !modules->is_array()) {
    return false;
  }
  out->rank = static_cast<int>(rank);
  out->target_modules.clear();
  for (const json& module : *modules) {
    if (!GetModule(module, &out->target_modules.emplace_back())) return false;
  }
  // Checkpoints of older servers do not have the field.
  const json overrides = config.value("overrides", json::array());
  return overrides.is_array() &&
         std::ranges::all_of(overrides, [out](const json& other) {
           return GetOverride(other, &out->overrides.emplace_back());
         });
}

absl::StatusOr<CheckpointInfo> InfoFromFields(const json& fields) {
  CheckpointInfo info;
  double created_at = 0;
  if (!fields.is_object() || !Get(fields, "adapter_id", &info.adapter_id) ||
      !Get(fields, "name", &info.name) ||
      !Get(fields, "last_step", &info.last_step) ||
      !Get(fields, "optim_steps", &info.optim_steps) ||
      !Get(fields, "size_bytes", &info.size_bytes) ||
      !Get(fields, "created_at", &created_at) || !fields.contains("config") ||
      !GetConfig(fields["config"], &info.config)) {
    return absl::DataLossError("the checkpoint's manifest is damaged");
  }
  info.created_at = absl::UnixEpoch() + absl::Seconds(created_at);
  return info;
}

json InfoToFields(const CheckpointInfo& info, const lora::ModelShape& shape) {
  return {{"format_version", kFormatVersion},
          {"adapter_id", info.adapter_id},
          {"name", info.name},
          {"last_step", info.last_step},
          {"optim_steps", info.optim_steps},
          {"size_bytes", info.size_bytes},
          {"created_at",
           absl::ToDoubleSeconds(info.created_at - absl::UnixEpoch())},
          {"config", ConfigToJson(info.config)},
          {"base_model", Fingerprint(shape)}};
}

const std::string* FindFile(const DurableFolder& folder,
                            std::string_view name) {
  const auto it = std::ranges::find(
      folder.files, name, &std::pair<std::string, std::string>::first);
  return it == folder.files.end() ? nullptr : &it->second;
}

absl::Status CheckOrigin(const json& fields, const lora::ModelShape& shape) {
  uint64_t version = 0;
  if (!fields.is_object() || !Get(fields, "format_version", &version) ||
      !fields.contains("base_model")) {
    return absl::DataLossError("the checkpoint's manifest is damaged");
  }
  if (version != kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "checkpoint format ", version, " is not ", kFormatVersion));
  }
  if (fields["base_model"] != Fingerprint(shape)) {
    return absl::FailedPreconditionError(
        "the checkpoint belongs to a base model of another shape");
  }
  return absl::OkStatus();
}

}  // namespace

std::string AdapterIo::AdapterDir(const std::string& adapter_id) const {
  return absl::StrCat(checkpoint_dir_, "/", adapter_id);
}

std::vector<std::string> AdapterIo::AdapterNames() const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(checkpoint_dir_, error), end;
       !error && it != end; it.increment(error)) {
    std::error_code ignored;
    std::string name = it->path().filename().string();
    // Adapter names never begin with a dot. Folders of the daemon's own files
    // do.
    if (name.front() != '.' && it->is_directory(ignored)) {
      names.push_back(std::move(name));
    }
  }
  return names;
}

void AdapterIo::RemoveStaleFiles() const {
  for (const std::string& adapter : AdapterNames()) {
    if (const absl::Status status = RemoveStaleTemporaries(AdapterDir(adapter));
        !status.ok()) {
      Log(LogLevel::kWarning, "stale files stay",
          {{"reason", status.message()}});
    }
  }
}

absl::StatusOr<CheckpointInfo> AdapterIo::Save(
    const SaveCheckpointRequest& request, const LoraConfig& config,
    const lora::AdapterState& state, uint64_t last_step) const {
  DurableFolder folder;
  folder.files = Export(config, state.weights);
  folder.files.emplace_back(
      kOptimizerFile, lora::WriteBuffers(config, shape_,
                                         {{"gradient", state.gradient},
                                          {"exp_avg", state.moment1},
                                          {"exp_avg_sq", state.moment2}}));
  CheckpointInfo info{.adapter_id = request.adapter_id,
                      .name = request.name,
                      .last_step = last_step,
                      .optim_steps = state.optim_steps,
                      .created_at = absl::Now(),
                      .config = config};
  for (const auto& [name, contents] : folder.files) {
    info.size_bytes += contents.size();
  }
  folder.fields = InfoToFields(info, shape_);
  folder.files.emplace_back(kStateFile, folder.fields.dump(2));
  std::error_code error;
  std::filesystem::create_directories(AdapterDir(request.adapter_id), error);
  if (error) {
    return absl::InternalError(
        absl::StrCat("making the adapter's folder: ", error.message()));
  }
  const absl::Status written = WriteDurableFolder(
      AdapterDir(request.adapter_id), request.name, folder, request.overwrite);
  if (absl::IsAlreadyExists(written)) {
    if (auto saved = SavedBefore(request, config, state, last_step)) {
      return *std::move(saved);
    }
  }
  WEFT_RETURN_IF_ERROR(written);
  return info;
}

std::optional<CheckpointInfo> AdapterIo::SavedBefore(
    const SaveCheckpointRequest& request, const LoraConfig& config,
    const lora::AdapterState& state, uint64_t last_step) const {
  const absl::StatusOr<LoadedCheckpoint> there =
      Load({.source_adapter_id = request.adapter_id, .name = request.name});
  if (!there.ok() || there->info.last_step != last_step ||
      there->info.config != config || !SameState(there->state, state)) {
    return std::nullopt;
  }
  return there->info;
}

absl::StatusOr<LoadedCheckpoint> AdapterIo::Load(
    const LoadCheckpointRequest& request) const {
  const std::string& name = request.name;
  const absl::StatusOr<DurableFolder> read =
      ReadDurableFolder(AdapterDir(request.source_adapter_id), name);
  if (!read.ok()) return NameOthers(read.status(), request.source_adapter_id);
  const DurableFolder& folder = *read;
  WEFT_RETURN_IF_ERROR(CheckOrigin(folder.fields, shape_));
  LoadedCheckpoint loaded;
  WEFT_ASSIGN_OR_RETURN(loaded.info, InfoFromFields(folder.fields));
  WEFT_ASSIGN_OR_RETURN(lora::PeftAdapter peft,
                        lora::ReadPeft(folder.files, shape_));
  peft.config.seed = loaded.info.config.seed;
  if (peft.config != loaded.info.config) {
    return absl::DataLossError(absl::StrCat(
        "checkpoint '", name, "': adapter_config.json and manifest differ"));
  }
  loaded.state.weights = std::move(peft.weights);
  if (request.weights_only) {
    loaded.info.last_step = 0;
    return loaded;
  }
  const std::string* optimizer = FindFile(folder, kOptimizerFile);
  if (optimizer == nullptr) {
    return absl::DataLossError(
        absl::StrCat("checkpoint '", name, "' has no ", kOptimizerFile));
  }
  const std::pair<const char*, std::vector<float>*> buffers[] = {
      {"gradient", &loaded.state.gradient},
      {"exp_avg", &loaded.state.moment1},
      {"exp_avg_sq", &loaded.state.moment2}};
  for (const auto& [buffer, values] : buffers) {
    WEFT_ASSIGN_OR_RETURN(
        *values,
        lora::ReadBuffer(*optimizer, buffer, loaded.info.config, shape_));
  }
  loaded.state.optim_steps = loaded.info.optim_steps;
  return loaded;
}

absl::Status AdapterIo::NameOthers(const absl::Status& status,
                                   const std::string& adapter_id) const {
  constexpr size_t kMaxNames = 5;
  if (!absl::IsNotFound(status)) return status;
  absl::StatusOr<std::vector<std::string>> names =
      ListDurableFolders(AdapterDir(adapter_id));
  if (!names.ok() || names->empty()) return status;
  std::ranges::sort(*names);
  const size_t others = names->size() - std::min(names->size(), kMaxNames);
  names->resize(names->size() - others);
  return absl::NotFoundError(absl::StrCat(
      status.message(), "; there are '", absl::StrJoin(*names, "', '"), "'",
      others > 0 ? absl::StrCat(" and ", others, " more") : ""));
}

absl::StatusOr<CheckpointInfo> AdapterIo::Describe(
    const std::string& adapter_id, const std::string& name) const {
  const absl::StatusOr<json> read =
      ReadDurableFields(AdapterDir(adapter_id), name);
  if (!read.ok()) return NameOthers(read.status(), adapter_id);
  const json& fields = *read;
  WEFT_RETURN_IF_ERROR(CheckOrigin(fields, shape_));
  return InfoFromFields(fields);
}

absl::StatusOr<std::vector<CheckpointInfo>> AdapterIo::List(
    const std::string& adapter_id) const {
  const std::vector<std::string> adapters =
      adapter_id.empty() ? AdapterNames() : std::vector{adapter_id};
  std::vector<CheckpointInfo> infos;
  for (const std::string& adapter : adapters) {
    const absl::StatusOr<std::vector<std::string>> names =
        ListDurableFolders(AdapterDir(adapter));
    if (!names.ok()) {
      Log(LogLevel::kWarning, "unreadable folder of checkpoints",
          {{"adapter", adapter}, {"reason", names.status().message()}});
      continue;
    }
    for (const std::string& name : *names) {
      const absl::StatusOr<json> fields =
          ReadDurableFields(AdapterDir(adapter), name);
      absl::StatusOr<CheckpointInfo> info =
          fields.ok() ? InfoFromFields(*fields) : fields.status();
      if (info.ok()) {
        infos.push_back(*std::move(info));
      } else {
        Log(LogLevel::kWarning, "damaged checkpoint",
            {{"adapter", adapter}, {"name", name}});
      }
    }
  }
  std::ranges::sort(infos, std::greater<>(), &CheckpointInfo::created_at);
  return infos;
}

absl::Status AdapterIo::Delete(const std::string& adapter_id,
                               const std::string& name) const {
  return RemoveDurableFolder(AdapterDir(adapter_id), name);
}

PeftFiles AdapterIo::Export(const LoraConfig& config,
                            const std::vector<float>& weights) const {
  return lora::WritePeft(config, shape_, weights, base_model_);
}

}  // namespace weft::engine
