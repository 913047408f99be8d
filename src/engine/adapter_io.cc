#include "src/engine/adapter_io.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/journal/durable_folder.h"
#include "src/lora/peft_format.h"

namespace weft::engine {
namespace {

using nlohmann::json;

constexpr int kFormatVersion = 1;
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kStateFile = "trainer_state.json";

// Shape of the base model, so that a checkpoint meets only its own kind.
json Fingerprint(const lora::ModelShape& shape) {
  return {{"num_layers", shape.num_layers},
          {"hidden", shape.hidden},
          {"q_width", shape.q_width},
          {"kv_width", shape.kv_width},
          {"ffn", shape.ffn},
          {"vocab", shape.vocab}};
}

json ConfigToJson(const LoraConfig& config) {
  json modules = json::array();
  for (const TargetModule module : config.target_modules) {
    modules.push_back(static_cast<int>(module));
  }
  return {{"rank", config.rank},
          {"alpha", config.alpha},
          {"seed", config.seed},
          {"target_modules", std::move(modules)}};
}

// Fields that the manifest's sums protect: damage was found before this.
CheckpointInfo InfoFromFields(const json& fields) {
  CheckpointInfo info;
  info.adapter_id = fields.value("adapter_id", "");
  info.name = fields.value("name", "");
  info.last_step = fields.value("last_step", uint64_t{0});
  info.optim_steps = fields.value("optim_steps", uint64_t{0});
  info.size_bytes = fields.value("size_bytes", uint64_t{0});
  info.created_at =
      absl::UnixEpoch() + absl::Seconds(fields.value("created_at", double{0}));
  const json config = fields.value("config", json::object());
  info.config.rank = config.value("rank", 0);
  info.config.alpha = config.value("alpha", double{0});
  info.config.seed = config.value("seed", uint64_t{0});
  info.config.target_modules.clear();
  for (const json& module : config.value("target_modules", json::array())) {
    info.config.target_modules.push_back(
        static_cast<TargetModule>(module.get<int>()));
  }
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
  if (fields.value("format_version", 0) != kFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint format ", fields.value("format_version", 0),
                     " is not ", kFormatVersion));
  }
  if (fields.value("base_model", json::object()) != Fingerprint(shape)) {
    return absl::FailedPreconditionError(
        "the checkpoint belongs to a base model of another shape");
  }
  return absl::OkStatus();
}

}  // namespace

std::string AdapterIo::AdapterDir(const std::string& adapter_id) const {
  return absl::StrCat(checkpoint_dir_, "/", adapter_id);
}

void AdapterIo::RemoveStaleFiles() const {
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(checkpoint_dir_, error)) {
    if (!entry.is_directory(error)) continue;
    if (const absl::Status status = RemoveStaleTemporaries(entry.path());
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
  std::filesystem::create_directory(AdapterDir(request.adapter_id), error);
  WEFT_RETURN_IF_ERROR(WriteDurableFolder(
      AdapterDir(request.adapter_id), request.name, folder, request.overwrite));
  return info;
}

absl::StatusOr<LoadedCheckpoint> AdapterIo::Load(
    const std::string& adapter_id, const std::string& name) const {
  WEFT_ASSIGN_OR_RETURN(const DurableFolder folder,
                        ReadDurableFolder(AdapterDir(adapter_id), name));
  WEFT_RETURN_IF_ERROR(CheckOrigin(folder.fields, shape_));
  LoadedCheckpoint loaded{.info = InfoFromFields(folder.fields), .state = {}};
  WEFT_ASSIGN_OR_RETURN(lora::PeftAdapter peft,
                        lora::ReadPeft(folder.files, shape_));
  loaded.state.weights = std::move(peft.weights);
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

absl::StatusOr<std::vector<CheckpointInfo>> AdapterIo::List(
    const std::string& adapter_id) const {
  std::vector<std::string> adapters;
  if (adapter_id.empty()) {
    std::error_code error;
    for (const auto& entry :
         std::filesystem::directory_iterator(checkpoint_dir_, error)) {
      adapters.push_back(entry.path().filename().string());
    }
  } else {
    adapters.push_back(adapter_id);
  }
  std::vector<CheckpointInfo> infos;
  for (const std::string& adapter : adapters) {
    WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                          ListDurableFolders(AdapterDir(adapter)));
    for (const std::string& name : names) {
      const absl::StatusOr<json> fields =
          ReadDurableFields(AdapterDir(adapter), name);
      if (fields.ok()) {
        infos.push_back(InfoFromFields(*fields));
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
