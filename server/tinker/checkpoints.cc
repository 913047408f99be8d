#include "server/tinker/checkpoints.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/wire/field_checks.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::server::tinker {
absl::StatusOr<CheckpointPath> PathOf(const Call& call) {
  return ParseCheckpointPath(
      absl::StrCat(kPathScheme, absl::StrJoin(call.args, "/")));
}

absl::StatusOr<uint64_t> ReadTtl(const Json& body) {
  if (Find(body, "ttl_seconds") == nullptr) return uint64_t{0};
  WEFT_ASSIGN_OR_RETURN(const int64_t ttl, Int(body, "ttl_seconds"));
  if (ttl >= kMinTtlSeconds && ttl <= int64_t{kMaxTtlSeconds}) {
    return static_cast<uint64_t>(ttl);
  }
  return BadField("ttl_seconds",
                  absl::StrCat("is ", ttl, ", must be in [", kMinTtlSeconds,
                               ", ", kMaxTtlSeconds, "]"));
}

std::string EntryOf(const CheckpointInfo& info, const char* key) {
  const auto entry = info.metadata.find(key);
  return entry == info.metadata.end() ? "" : entry->second;
}

std::string BaseModelOf(const Front& front, const CheckpointInfo& info) {
  const std::string name = EntryOf(info, kBaseModel);
  return name.empty() ? front.model_name() : name;
}

namespace {

constexpr int64_t kDefaultLimit = 20;
constexpr int64_t kMaxLimit = 1000;

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

bool Trains(const LoraConfig& config, TargetModule module) {
  return std::ranges::count(config.target_modules, module) > 0;
}

// Returns a checkpoint in the form of the SDK's type Checkpoint.
Json CheckpointJson(const CheckpointInfo& info, const CheckpointPath& path) {
  Json out = {
      {"checkpoint_id", path.Id()},        {"checkpoint_type", path.KindName()},
      {"time", TimeText(info.created_at)}, {"tinker_path", path.ToString()},
      {"size_bytes", info.size_bytes},     {"public", false}};
  ShowMetadata(EntryOf(info, kUserMetadata), &out);
  if (info.expires_at != absl::InfiniteFuture()) {
    out["expires_at"] = TimeText(info.expires_at);
  }
  return out;
}

// Returns a run in the form of the SDK's type TrainingRun.
Json RunJson(const Front& front, const Caller& caller, const Run& run) {
  const std::string id = ModelOfAdapter(run.adapter);
  Json out = {{"training_run_id", id},
              {"base_model", front.model_name()},
              {"model_owner", caller.tenant()},
              {"is_lora", true},
              {"corrupted", false},
              {"lora_rank", run.config.rank},
              {"last_request_time", TimeText(run.last_used_at)}};
  const Model* const model = front.models.Find(id);
  // The model with this id may belong to another owner.
  if (model != nullptr && model->owner == OwnerKey(caller)) {
    ShowMetadata(model->user_metadata, &out);
  }
  for (const CheckpointInfo& info : run.checkpoints) {
    const CheckpointPath path = PathOfWeft(id, info.name);
    const char* const field = path.kind == CheckpointKind::kSampler
                                  ? "last_sampler_checkpoint"
                                  : "last_checkpoint";
    if (out.contains(field)) continue;
    out[field] = CheckpointJson(info, path);
  }
  return out;
}

// Returns the reply of weights_info.
Json WeightsJson(const Front& front, const CheckpointInfo& info) {
  const LoraConfig& config = info.config;
  return {{"base_model", BaseModelOf(front, info)},
          {"is_lora", true},
          {"lora_rank", config.rank},
          {"train_unembed", Trains(config, TargetModule::kLmHead)},
          {"train_mlp", Trains(config, TargetModule::kGateProj)},
          {"train_attn", Trains(config, TargetModule::kQProj)},
          {"optimizer_config", OptimizerJson(TypeOf(info.optimizer))}};
}

// Adds the caller's adapters to `*all`, beginning after the name `after`. Asks
// the engine for one page after the other.
absl::Status ListAdapters(Front& front, const CallPtr& call,
                          const std::string& after,
                          std::shared_ptr<std::vector<AdapterInfo>> all,
                          Callback<bool> done) {
  v1::ListAdaptersRequest request;
  request.set_page_size(1000);
  request.set_page_token(after);
  const auto add = [&front, call, all, done](const AdapterPage& page) {
    // A run has a rank, which an adapter may not have yet.
    if (std::ranges::any_of(page.adapters, &AdapterInfo::restoring)) {
      return done(absl::UnavailableError(
          "adapters are being restored from --state-dir; try again"));
    }
    all->insert(all->end(), page.adapters.begin(), page.adapters.end());
    if (!page.more) return done(true);
    const absl::Status refused =
        ListAdapters(front, call, page.adapters.back().adapter_id, all, done);
    if (!refused.ok()) done(refused);
  };
  return front.port.Call(call->origin(), Rpc::kListAdapters, request,
                         &engine::Engine::ListAdapters, IfOk(done, add));
}

// Calls `make` with the caller's runs. Responds with the JSON or the error that
// `make` returns.
absl::Status WithRuns(
    Front& front, const CallPtr& call, const Respond& respond,
    std::function<absl::StatusOr<Json>(const std::vector<Run>&)> make) {
  const auto adapters = std::make_shared<std::vector<AdapterInfo>>();
  const auto finish =
      ReplyWith(respond, [adapters, make](const Checkpoints& checkpoints) {
        return make(MakeRuns(*adapters, checkpoints));
      });
  const Callback<bool> list =
      IfOk(respond, [&front, call, respond, finish](bool /*listed*/) {
        const absl::Status refused = ListCheckpoints(front, call, "", finish);
        if (!refused.ok()) Fail(respond, refused);
      });
  return ListAdapters(front, call, "", adapters, list);
}

Json CheckpointsJson(const Checkpoints& checkpoints) {
  Json out = Json::array();
  for (const CheckpointInfo& info : checkpoints) {
    const CheckpointPath path =
        PathOfWeft(ModelOfAdapter(info.adapter_id), info.name);
    out.push_back(CheckpointJson(info, path));
  }
  return out;
}

}  // namespace

std::string TimeText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", time, absl::UTCTimeZone());
}

absl::Status ListCheckpoints(Front& front, const CallPtr& call,
                             const std::string& adapter,
                             Callback<Checkpoints> done) {
  v1::ListCheckpointsRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call(call->origin(), Rpc::kListCheckpoints, request,
                         &engine::Engine::ListCheckpoints, std::move(done));
}

absl::Status FindCheckpoint(Front& front, const CallPtr& call,
                            const CheckpointPath& path,
                            Callback<CheckpointInfo> done) {
  return ListCheckpoints(
      front, call, AdapterOfModel(path.run),
      IfOk(done, [path, done](const Checkpoints& checkpoints) {
        for (const CheckpointInfo& info : checkpoints) {
          if (info.name == path.WeftName()) return done(info);
        }
        done(absl::NotFoundError(
            absl::StrCat("no checkpoint ", Quoted(path.ToString()))));
      }));
}

absl::Status ListRuns(Front& front, const CallPtr& call,
                      const Respond& respond) {
  if (call->query.contains("project_id")) {
    return NoProjects("project_id");
  }
  return WithRuns(front, call, respond,
                  [&front, call](const std::vector<Run>& runs) {
                    Json all = Json::array();
                    for (const Run& run : runs) {
                      all.push_back(RunJson(front, call->caller, run));
                    }
                    return PageJson(*call, "training_runs", all);
                  });
}

absl::Status GetRun(Front& front, const CallPtr& call, const Respond& respond) {
  return WithRuns(
      front, call, respond,
      [&front, call](const std::vector<Run>& runs) -> absl::StatusOr<Json> {
        const std::string adapter = AdapterOfModel(call->args[0]);
        for (const Run& run : runs) {
          if (run.adapter == adapter) return RunJson(front, call->caller, run);
        }
        return absl::NotFoundError(
            absl::StrCat("no training run ", Quoted(call->args[0])));
      });
}

absl::Status ListRunCheckpoints(Front& front, const CallPtr& call,
                                const Respond& respond) {
  return ListCheckpoints(front, call, AdapterOfModel(call->args[0]),
                         ReplyWith(respond, [](const Checkpoints& found) {
                           return Json{{"checkpoints", CheckpointsJson(found)}};
                         }));
}

absl::Status ListAllCheckpoints(Front& front, const CallPtr& call,
                                const Respond& respond) {
  return ListCheckpoints(
      front, call, "", ReplyWith(respond, [call](const Checkpoints& found) {
        return PageJson(*call, "checkpoints", CheckpointsJson(found));
      }));
}

absl::Status DeleteCheckpoint(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  v1::DeleteCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(path.run));
  request.set_name(path.WeftName());
  return front.port.CallWith<bool>(
      call->origin(), Rpc::kDeleteCheckpoint, request,
      [](engine::Engine& engine, std::pair<std::string, std::string> names,
         auto then) {
        engine.DeleteCheckpoint(std::move(names.first), std::move(names.second),
                                std::move(then));
      },
      IfOk(respond, [&front, call, path, respond](bool /*deleted*/) {
        front.accounts.Note(call->caller, "delete", path);
        respond({.status = 204});
      }));
}

absl::Status SetCheckpointTtl(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  v1::SetCheckpointTtlRequest request;
  request.set_adapter_id(AdapterOfModel(path.run));
  request.set_name(path.WeftName());
  WEFT_ASSIGN_OR_RETURN(const uint64_t ttl, ReadTtl(call->body));
  request.set_ttl_seconds(ttl);
  return front.port.Call(call->origin(), Rpc::kSetCheckpointTtl, request,
                         &engine::Engine::SetCheckpointTtl,
                         ReplyWith(respond, [](const CheckpointInfo& /*info*/) {
                           return Json::object();
                         }));
}

absl::Status GetWeightsInfo(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path,
                        ParseCheckpointPath(Text(call->body, "tinker_path")));
  return FindCheckpoint(
      front, call, path,
      ReplyWith(respond, [&front](const CheckpointInfo& info) {
        return WeightsJson(front, info);
      }));
}

std::vector<Run> MakeRuns(const std::vector<AdapterInfo>& adapters,
                          const Checkpoints& checkpoints) {
  std::map<std::string, Run> runs;
  for (const AdapterInfo& info : adapters) {
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

}  // namespace weft::server::tinker
