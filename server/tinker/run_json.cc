#include "server/tinker/run_json.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/field_checks.h"
#include "server/tinker/loaded_adapters.h"
#include "server/tinker/models.h"
#include "src/base/status_macros.h"
#include "src/base/tokens.h"

namespace weft::tinker {
namespace {

constexpr int64_t kDefaultLimit = 20;
constexpr int64_t kMaxLimit = 1000;

std::string TimeText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", time, absl::UTCTimeZone());
}

absl::StatusOr<int64_t> QueryNumber(const Call& call, const char* name,
                                    int64_t otherwise, int64_t most) {
  const auto found = call.query.find(name);
  if (found == call.query.end()) return otherwise;
  int64_t value = 0;
  if (absl::SimpleAtoi(found->second, &value) && value >= 0) {
    return std::min(value, most);
  }
  return BadField(name, "must be a number that is not negative");
}

// Returns true if the front loaded the adapter from a checkpoint for sampling.
// If the caller is an admin, the adapter's name begins with the tenant.
bool IsSamplerAdapter(absl::string_view adapter) {
  const size_t separator = adapter.find(kTenantSeparator);
  if (separator != adapter.npos) adapter.remove_prefix(separator + 1);
  return absl::StartsWith(adapter, kSamplerAdapterPrefix);
}

bool Trains(const LoraConfig& config, TargetModule module) {
  return std::ranges::count(config.target_modules, module) > 0;
}

}  // namespace

Json CheckpointJson(const CheckpointInfo& info, const CheckpointPath& path,
                    const CheckpointExtras& extras) {
  Json out = {
      {"checkpoint_id", path.Id()},        {"checkpoint_type", path.KindName()},
      {"time", TimeText(info.created_at)}, {"tinker_path", path.ToString()},
      {"size_bytes", info.size_bytes},     {"public", false}};
  if (!extras.user_metadata.empty()) {
    out["user_metadata"] = Shown(extras.user_metadata);
  }
  if (extras.expires_at) out["expires_at"] = TimeText(*extras.expires_at);
  return out;
}

std::vector<Run> MakeRuns(const std::vector<AdapterInfo>& adapters,
                          const std::vector<CheckpointInfo>& checkpoints) {
  std::map<std::string, Run> runs;
  for (const AdapterInfo& info : adapters) {
    if (IsSamplerAdapter(info.adapter_id)) continue;
    runs[info.adapter_id] = {.adapter = info.adapter_id,
                             .config = info.config,
                             .last_used_at = info.last_used_at};
  }
  for (const CheckpointInfo& info : checkpoints) {
    Run& run = runs[info.adapter_id];
    if (run.adapter.empty()) {
      run = {.adapter = info.adapter_id,
             .config = info.config,
             .last_used_at = info.created_at};
    }
    run.checkpoints.push_back(info);
  }
  std::vector<Run> out;
  out.reserve(runs.size());
  for (auto& [name, run] : runs) out.push_back(std::move(run));
  std::ranges::stable_sort(out, std::greater(), &Run::last_used_at);
  return out;
}

Json RunJson(const Front& front, const Caller& caller, const Run& run) {
  const std::string id = ModelOfAdapter(run.adapter);
  Json out = {{"training_run_id", id},
              {"base_model", front.model_name()},
              {"model_owner", caller.tenant()},
              {"is_lora", true},
              {"corrupted", false},
              {"lora_rank", run.config.rank},
              {"last_request_time", TimeText(run.last_used_at)}};
  const auto model = front.models.find(id);
  // The model with this id may belong to another owner.
  if (model != front.models.end() && model->second.owner == OwnerKey(caller)) {
    Json metadata = Shown(model->second.user_metadata);
    if (metadata.is_object()) out["user_metadata"] = std::move(metadata);
  }
  for (const CheckpointInfo& info : run.checkpoints) {
    const CheckpointPath path = PathOfWeft(id, info.name);
    const char* const field = path.kind == CheckpointKind::kSampler
                                  ? "last_sampler_checkpoint"
                                  : "last_checkpoint";
    if (out.contains(field)) continue;
    out[field] = CheckpointJson(info, path, FindExtras(front, caller, path));
  }
  return out;
}

absl::StatusOr<Json> PageJson(const Call& call, const char* name,
                              const Json& all) {
  const auto total = static_cast<int64_t>(all.size());
  WEFT_ASSIGN_OR_RETURN(const int64_t limit,
                        QueryNumber(call, "limit", kDefaultLimit, kMaxLimit));
  WEFT_ASSIGN_OR_RETURN(const int64_t offset,
                        QueryNumber(call, "offset", 0, total));
  Json part = Json::array();
  for (int64_t i = offset; i < std::min(total, offset + limit); ++i) {
    part.push_back(all[static_cast<size_t>(i)]);
  }
  return Json{{name, part},
              {"cursor",
               {{"offset", offset}, {"limit", limit}, {"total_count", total}}}};
}

Json WeightsJson(const std::string& base_model, const LoraConfig& config) {
  return {{"base_model", base_model},
          {"is_lora", true},
          {"lora_rank", config.rank},
          {"train_unembed", Trains(config, TargetModule::kLmHead)},
          {"train_mlp", Trains(config, TargetModule::kGateProj)},
          {"train_attn", Trains(config, TargetModule::kQProj)},
          {"optimizer_config", {{"type", "adamw"}}}};
}

}  // namespace weft::tinker
