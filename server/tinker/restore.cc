#include "server/tinker/restore.h"

#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "server/tinker/checkpoint_extras.h"
#include "server/tinker/loaded_adapters.h"
#include "server/tinker/models.h"
#include "server/tinker/reaper.h"
#include "server/tinker/samplers.h"
#include "server/tinker/sessions.h"
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
  const absl::Status asked = front.port.Call<AdapterInfo>(
      {.caller = model.caller}, Rpc::kGetAdapter, request,
      [](Engine& engine, std::string id, auto then) {
        engine.GetAdapter(std::move(id), std::move(then));
      },
      [&front, id = model.id](const absl::StatusOr<AdapterInfo>& info) {
        const auto found = front.models.find(id);
        if (!info.ok() || found == front.models.end()) return;
        found->second.made = true;
        found->second.line.next = static_cast<int64_t>(info->next_step);
      });
  // If the process ended before the adapter was made, there is no adapter, and
  // line.next stays 1.
  if (asked.ok() || absl::IsNotFound(asked)) return true;
  if (absl::IsUnavailable(asked)) return false;
  Log(LogLevel::kWarning, "a model's place is not known",
      {{"model", model.id}, {"error", std::string(asked.message())}});
  return true;
}

std::shared_ptr<Call> CallOf(LedgerEntry entry) {
  auto call = std::make_shared<Call>();
  call->http.method = "POST";
  call->http.target = entry.fields.value("target", "");
  call->http.content_type = entry.fields.value("content_type", "");
  call->http.body = std::move(entry.bytes);
  call->caller = CallerFromJson(entry.fields["caller"]);
  call->kept = true;
  return call;
}

// Returns the requests of the ledger's steps, in the order of their sequence
// numbers. Erases those of models that are gone.
std::deque<CallPtr> KeptCalls(const Front& front) {
  std::multimap<int64_t, CallPtr> calls;
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kStep)) {
    if (front.models.contains(entry.fields.value("model", ""))) {
      const int64_t seq = entry.fields.value("seq", int64_t{0});
      calls.emplace(seq, CallOf(std::move(entry)));
    } else {
      front.ledger.Erase(EntryKind::kStep, entry.id);
    }
  }
  std::deque<CallPtr> sorted;
  for (auto& [seq, call] : calls) sorted.push_back(std::move(call));
  return sorted;
}

// Runs the calls in order. After an error, goes on later.
void RunAll(Front& front, std::deque<CallPtr> calls, const RunAgain& run) {
  while (!calls.empty()) {
    if (!run(calls.front()).ok()) {
      return front.after(kPause,
                         [&front, calls, run] { RunAll(front, calls, run); });
    }
    calls.pop_front();
  }
  front.ready = true;
}

}  // namespace

void RestoreTables(Front& front) {
  RestoreSessions(front, SteadyNow());
  RestoreModels(front);
  RestoreSamplers(front);
  RestoreExtras(front);
  RestoreOrphans(front,
                 [&front](const std::string& owner, const std::string& name) {
                   return IsLoaded(front, owner, name);
                 });
  front.restored = true;
}

void RestoreSteps(Front& front, const RunAgain& run) {
  for (auto& [id, model] : front.models) {
    if (PlaceLine(front, model)) continue;
    return front.after(kPause, [&front, run] { RestoreSteps(front, run); });
  }
  RunAll(front, KeptCalls(front), run);
}

}  // namespace weft::tinker
