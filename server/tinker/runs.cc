#include "server/tinker/runs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/models.h"
#include "server/tinker/run_json.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

using Checkpoints = std::vector<CheckpointInfo>;

// Lists the checkpoints of an adapter, or of all adapters of the caller if
// `adapter` is empty.
absl::Status ListCheckpoints(Front& front, const CallPtr& call,
                             const std::string& adapter,
                             Callback<Checkpoints> done) {
  v1::ListCheckpointsRequest request;
  request.set_adapter_id(adapter);
  return front.port.Call<Checkpoints>(
      call->origin(), Rpc::kListCheckpoints, request,
      [](Engine& engine, std::string id, auto then) {
        engine.ListCheckpoints(std::move(id), std::move(then));
      },
      std::move(done));
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
  return front.port.Call<AdapterPage>(
      call->origin(), Rpc::kListAdapters, request,
      [](Engine& engine, ListAdaptersRequest plain, auto then) {
        engine.ListAdapters(std::move(plain), std::move(then));
      },
      [&front, call, all, done](const absl::StatusOr<AdapterPage>& page) {
        if (!page.ok()) return done(page.status());
        all->insert(all->end(), page->adapters.begin(), page->adapters.end());
        if (!page->more) return done(true);
        const absl::Status refused = ListAdapters(
            front, call, page->adapters.back().adapter_id, all, done);
        if (!refused.ok()) done(refused);
      });
}

// Calls `make` with the caller's runs. Responds with the JSON or the error that
// `make` returns.
absl::Status WithRuns(
    Front& front, const CallPtr& call, const Respond& respond,
    std::function<absl::StatusOr<Json>(const std::vector<Run>&)> make) {
  const auto adapters = std::make_shared<std::vector<AdapterInfo>>();
  const auto finish = [adapters, respond,
                       make](const absl::StatusOr<Checkpoints>& checkpoints) {
    if (!checkpoints.ok()) return respond(ErrorReply(checkpoints.status()));
    const absl::StatusOr<Json> reply = make(MakeRuns(*adapters, *checkpoints));
    respond(reply.ok() ? JsonReply(*reply) : ErrorReply(reply.status()));
  };
  return ListAdapters(
      front, call, "", adapters,
      [&front, call, respond, finish](const absl::StatusOr<bool>& listed) {
        absl::Status status = listed.status();
        if (status.ok()) status = ListCheckpoints(front, call, "", finish);
        if (!status.ok()) respond(ErrorReply(status));
      });
}

// Returns the path of the checkpoint that the URL of the request names.
absl::StatusOr<CheckpointPath> PathOf(const Call& call) {
  return ParseCheckpointId(call.args[0],
                           absl::StrCat(call.args[1], "/", call.args[2]));
}

Json CheckpointsJson(const Front& front, const Caller& caller,
                     const Checkpoints& checkpoints) {
  Json out = Json::array();
  for (const CheckpointInfo& info : checkpoints) {
    const CheckpointPath path =
        PathOfWeft(ModelOfAdapter(info.adapter_id), info.name);
    out.push_back(CheckpointJson(info, path, FindExtras(front, caller, path)));
  }
  return out;
}

}  // namespace

absl::Status FindCheckpoint(Front& front, const CallPtr& call,
                            const CheckpointPath& path,
                            Callback<CheckpointInfo> done) {
  return ListCheckpoints(
      front, call, AdapterOfModel(path.run),
      [path, done](const absl::StatusOr<Checkpoints>& checkpoints) {
        if (!checkpoints.ok()) return done(checkpoints.status());
        for (const CheckpointInfo& info : *checkpoints) {
          if (info.name == path.WeftName()) return done(info);
        }
        done(absl::NotFoundError(
            absl::StrCat("no checkpoint ", Quoted(path.ToString()))));
      });
}

absl::Status DeleteRunCheckpoint(Front& front, CallOrigin origin,
                                 const CheckpointPath& path,
                                 Callback<bool> done) {
  v1::DeleteCheckpointRequest request;
  request.set_adapter_id(AdapterOfModel(path.run));
  request.set_name(path.WeftName());
  return front.port.Call<bool>(
      std::move(origin), Rpc::kDeleteCheckpoint, request,
      [](Engine& engine, std::pair<std::string, std::string> names, auto then) {
        engine.DeleteCheckpoint(std::move(names.first), std::move(names.second),
                                std::move(then));
      },
      std::move(done));
}

absl::Status ListRuns(Front& front, const CallPtr& call,
                      const Respond& respond) {
  if (call->query.contains("project_id")) {
    return absl::UnimplementedError(
        "project_id is not offered: this server has no projects. Leave it out "
        "to list all runs");
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
  return ListCheckpoints(
      front, call, AdapterOfModel(call->args[0]),
      [&front, call, respond](const absl::StatusOr<Checkpoints>& found) {
        respond(
            found.ok()
                ? JsonReply({{"checkpoints",
                              CheckpointsJson(front, call->caller, *found)}})
                : ErrorReply(found.status()));
      });
}

absl::Status ListAllCheckpoints(Front& front, const CallPtr& call,
                                const Respond& respond) {
  return ListCheckpoints(
      front, call, "",
      [&front, call, respond](const absl::StatusOr<Checkpoints>& found) {
        if (!found.ok()) return respond(ErrorReply(found.status()));
        const absl::StatusOr<Json> page = PageJson(
            *call, "checkpoints", CheckpointsJson(front, call->caller, *found));
        respond(page.ok() ? JsonReply(*page) : ErrorReply(page.status()));
      });
}

absl::Status DeleteCheckpoint(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  return DeleteRunCheckpoint(
      front, call->origin(), path,
      [&front, call, path, respond](const absl::StatusOr<bool>& deleted) {
        if (!deleted.ok()) return respond(ErrorReply(deleted.status()));
        KeepExtras(front, call->caller, path, {});
        respond({.status = 204});
      });
}

absl::Status SetCheckpointTtl(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, PathOf(*call));
  WEFT_ASSIGN_OR_RETURN(const CheckpointExtras given, ReadExtras(call->body));
  return FindCheckpoint(front, call, path,
                        [&front, call, path, given,
                         respond](const absl::StatusOr<CheckpointInfo>& info) {
                          if (!info.ok())
                            return respond(ErrorReply(info.status()));
                          CheckpointExtras extras =
                              FindExtras(front, call->caller, path);
                          extras.expires_at = given.expires_at;
                          if (extras.charge == nullptr) {
                            auto charge = front.ChargeEntry(call->owner(), 0);
                            if (!charge.ok()) {
                              return respond(ErrorReply(charge.status()));
                            }
                            extras.charge = *std::move(charge);
                          }
                          KeepExtras(front, call->caller, path, extras);
                          respond(JsonReply(Json::object()));
                        });
}

absl::Status GetWeightsInfo(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string text,
                        StringField(call->body, "tinker_path"));
  WEFT_ASSIGN_OR_RETURN(const CheckpointPath path, ParseCheckpointPath(text));
  return FindCheckpoint(
      front, call, path,
      [base = BaseModelOf(front, call->caller, path),
       respond](const absl::StatusOr<CheckpointInfo>& info) {
        respond(info.ok() ? JsonReply(WeightsJson(base, info->config))
                          : ErrorReply(info.status()));
      });
}

absl::Status RefuseSharing(Front& /*front*/, const CallPtr& /*call*/,
                           const Respond& /*respond*/) {
  return absl::UnimplementedError(
      "checkpoints cannot be shared: each is its tenant's");
}

}  // namespace weft::tinker
