#include "server/tinker/restore.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "server/status_conversion.h"
#include "server/tinker/audit.h"
#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/custom_losses.h"
#include "server/tinker/loaded_adapters.h"
#include "server/tinker/models.h"
#include "server/tinker/reaper.h"
#include "server/tinker/routes.h"
#include "server/tinker/samplers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/tinker/usage.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
namespace {

// The pause before the next try if a step is refused, or if an adapter is not
// restored yet.
constexpr absl::Duration kPause = absl::Milliseconds(200);

// Sets Model::made, and line.next to the number of the adapter's next step.
// Returns false if the adapter is not restored yet.
bool PlaceLine(Front& front, Model& model) {
  v1::GetAdapterRequest request;
  request.set_adapter_id(model.adapter);
  const absl::Status asked = front.port.Call(
      {.caller = model.caller}, Rpc::kGetAdapter, request, &Engine::GetAdapter,
      [&front, id = model.id](const absl::StatusOr<AdapterInfo>& info) {
        const auto found = front.models.find(id);
        if (!info.ok() || found == front.models.end()) return;
        found->second.made = true;
        found->second.line.next = static_cast<int64_t>(info->next_step);
      });
  // If the process ended before the adapter was made, there is no adapter, and
  // line.next stays 1.
  if (asked.ok() || absl::IsNotFound(asked)) return true;
  if (absl::IsUnavailable(asked) || RetryMillis(asked)) return false;
  Log(LogLevel::kWarning, "a model's place is not known",
      {{"model", model.id}, {"error", std::string(asked.message())}});
  return true;
}

CallPtr CallOf(LedgerEntry entry) {
  auto call = std::make_shared<Call>();
  call->http.method = "POST";
  call->http.target = entry.fields.value("target", "");
  call->http.content_type = entry.fields.value("content_type", "");
  call->http.body = std::move(entry.bytes);
  call->caller = CallerFromJson(entry.fields["caller"]);
  call->kept = true;
  return call;
}

// Has a step fail in its turn with `status`, so that the steps after it run.
void Fail(Front& front, const LedgerEntry& entry, const Call& call,
          const absl::Status& status) {
  Log(LogLevel::kWarning, "a promised step cannot run again",
      {{"step", entry.id}, {"error", std::string(status.message())}});
  if (!front.futures.Open(entry.id, call.owner(), Scope::kTrain)) return;
  EnterStep(
      front, entry.fields.value("model", ""),
      entry.fields.value("seq", int64_t{0}),
      {.future = entry.id,
       .origin = call.origin(),
       .rpc = Rpc::kForwardBackward,
       .task = [status](const Callback<FutureResult>&) { return status; }});
}

// Runs the request of a step again. Returns an error only if the request may
// succeed later. Erases a request whose model is gone.
absl::Status RunStep(Front& front, const std::string& id) {
  std::optional<LedgerEntry> entry = front.ledger.ReadStep(id);
  if (!entry) return absl::OkStatus();
  if (!front.models.contains(entry->fields.value("model", ""))) {
    front.ledger.Erase(EntryKind::kStep, id);
    return absl::OkStatus();
  }
  const CallPtr call = CallOf(*entry);
  const absl::Status run = ServeAgain(front, call);
  if (run.ok() || RetryMillis(run).has_value()) return run;
  Fail(front, *entry, *call, run);
  return absl::OkStatus();
}

// Runs the requests of steps in order, one at a time, so that few are in memory
// twice. After an error, goes on later.
void RunSteps(Front& front, std::vector<std::string> ids, size_t next) {
  for (; next < ids.size(); ++next) {
    if (RunStep(front, ids[next]).ok()) continue;
    return front.after(kPause, [&front, ids = std::move(ids), next] {
      RunSteps(front, ids, next);
    });
  }
  front.ready = true;
}

}  // namespace

void RestoreTables(Front& front) {
  RestoreSessions(front, SteadyNow());
  RestoreModels(front);
  RestoreSamplers(front);
  RestoreLosses(front);
  RestoreExtras(front);
  RestoreUsage(front);
  RestoreEvents(front);
  RestoreOrphans(front,
                 [&front](const std::string& owner, const std::string& name) {
                   return IsLoaded(front, owner, name);
                 });
  front.restored = true;
}

void RestoreSteps(Front& front) {
  for (auto& [id, model] : front.models) {
    if (PlaceLine(front, model)) continue;
    return front.after(kPause, [&front] { RestoreSteps(front); });
  }
  RunSteps(front, front.ledger.StepIds(), 0);
}

}  // namespace weft::tinker
