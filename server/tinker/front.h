// The state that all handlers of the Tinker front share, and the form in which
// a handler gets its request.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_FRONT_H_
#define WEFT_SERVER_TINKER_FRONT_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/call.h"
#include "server/engine_port.h"
#include "server/http/fair_budget.h"
#include "server/http/message.h"
#include "server/tinker/fields.h"
#include "server/tinker/futures.h"
#include "server/tinker/ledger.h"
#include "server/tinker/turns.h"
#include "src/request/reply.h"

namespace weft::tinker {

// A client's session. sessions.h says when a session ends.
struct Session {
  std::string id;
  Caller caller;
  std::string owner;  // OwnerKey(caller).
  std::string key;    // The idempotency key of create_session; may be empty.
  std::string user_metadata;  // ShownField, like display_name.
  std::string display_name;
  absl::Time last_beat;
  absl::Time created_at;         // In whole microseconds; by the wall clock.
  std::shared_ptr<void> charge;  // ChargeEntry.
};

// Begins work, and passes its result to `done` later. If a Task returns an
// error, nothing has begun and `done` does not run.
using Task = std::function<absl::Status(Callback<FutureResult> done)>;

// A step whose request has arrived.
struct ArrivedStep {
  std::string future;
  CallOrigin origin;
  Rpc rpc;  // The call as which a refusal counts.
  Task task;
  // The charge for the step's bytes, in Front::waiting or ServiceCore::memory.
  std::shared_ptr<void> reserved;
};

// The steps of one model that the engine does not have yet.
struct StepLine {
  int64_t next = 1;   // Above the numbers of all steps that the engine has.
  bool held = false;  // The model is being made, so no step may begin.
  std::map<int64_t, ArrivedStep> waiting;  // By sequence number.
  bool retries = false;                    // A timer will try them again.
};

// A model in training: an adapter, whose steps have the client's sequence
// numbers.
struct Model {
  std::string id;
  Caller caller;
  std::string owner;
  std::string session;
  std::string adapter;
  // The base model's name as the client that made the model gave it. The client
  // can load a tokenizer by this name. Empty: as the server names it.
  std::string base_model;
  std::string user_metadata;     // ShownField.
  std::shared_ptr<void> charge;  // ChargeEntry.
  bool made = false;             // The adapter exists.
  StepLine line;
};

// A sampling session: the weights that a sampling client samples from.
struct Sampler {
  std::string id;
  std::string owner;
  std::string session;
  std::string adapter;   // Empty for the base model.
  std::string snapshot;  // Empty: no snapshot, but the current weights.
  // Samples follow the adapter; `snapshot` is released.
  bool in_flight = false;
  std::string model_path;  // Empty if not made from a checkpoint.
  uint64_t used = 0;       // A later use sets a higher number (TouchSampler).
  std::shared_ptr<void> charge;  // ChargeEntry.
};

// The fields of a sampling session that the ledger keeps.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Sampler, session, adapter,
                                                snapshot, in_flight, model_path)

// A custom loss that a client has uploaded (training.h).
struct UploadedLoss {
  std::string owner;
  std::string session;
  std::string loss;              // A serialized v1::CustomLoss.
  std::shared_ptr<void> charge;  // ChargeEntry.
};

// What clients of the Tinker API say about a checkpoint (checkpoints.h).
struct CheckpointExtras {
  std::string user_metadata;             // ShownField.
  std::optional<absl::Time> expires_at;  // In whole seconds.
  std::string base_model;                // Model::base_model.
  std::string copied_from;       // The path of the checkpoint copied; or empty.
  std::shared_ptr<void> charge;  // ChargeEntry.
};
struct KeptExtras {
  Caller caller;
  std::string path;  // CheckpointPath::ToString.
  CheckpointExtras extras;
};

// An adapter that the front loads for sampling sessions (adapters.h).
struct LoadedAdapter {
  bool ready = false;  // The load has ended.
  int users = 0;       // The sampling sessions that use the adapter.
  // The next process deletes the adapter unless a sampling session uses it.
  bool goes_at_next_start = false;
  // Callbacks for the end of the load, one per sampling session that waits.
  std::vector<Callback<std::string>> waiting;
};

// An adapter that is to be deleted (adapters.h).
struct Orphan {
  Caller caller;
  std::string adapter;
  bool running = false;  // The engine handles a request to delete it.
};

// What was used in an hour (accounts.h).
struct UsageCounts {
  int64_t train_tokens = 0;
  int64_t prompt_tokens = 0;  // Without cached_tokens.
  int64_t cached_tokens = 0;
  int64_t sampled_tokens = 0;
  int64_t checkpoints = 0;
};
struct UsageKey {
  std::string owner;
  int64_t hour = 0;  // In hours since the epoch.
  std::string session;

  friend auto operator<=>(const UsageKey&, const UsageKey&) = default;
};
struct UsageRow {
  UsageCounts counts;
  bool changed = false;          // The ledger has not these counts yet.
  std::shared_ptr<void> charge;  // ChargeIfRoom.
};

// What a client did to a checkpoint (accounts.h).
struct KeptEvent {
  Json event;
  std::shared_ptr<void> charge;  // ChargeIfRoom.
};

struct TrainBody;  // training.h

// A request, as its handler gets it.
struct Call {
  HttpRequest http;
  std::vector<std::string> args;  // The path's parts at the route's asterisks.
  std::map<std::string, std::string> query;
  Json body;  // The body as a JSON object; empty if the body is protobuf.
  // The charge of http.body and `body` to the caller's memory.
  std::shared_ptr<void> charge;
  std::shared_ptr<TrainBody> train;  // What ReadTrain has read, if it has.
  Caller caller;
  // Whether the caller has the scopes of DeleteAdapter (train) and of Sample.
  bool may_delete = false;
  bool may_sample = false;
  // The JWT of the caller's key (accounts.h). Set only for a request for it.
  std::string jwt;
  bool kept = false;  // The request comes from the ledger; no client waits.

  [[nodiscard]] std::string owner() const { return OwnerKey(caller); }
  [[nodiscard]] CallOrigin origin() const {
    return {.caller = caller, .peer = http.peer};
  }
};
using CallPtr = std::shared_ptr<const Call>;

struct Front {
  // `after` runs a function on the front's thread after a delay.
  Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
        Futures::After after);

  // Return the caller's entry. Errors: NOT_FOUND, also if another owner has it;
  // the error of `id`.
  using Id = absl::StatusOr<std::string>;
  [[nodiscard]] absl::StatusOr<Session*> FindSession(const Call& call,
                                                     const Id& id);
  [[nodiscard]] absl::StatusOr<Model*> FindModel(const Call& call,
                                                 const Id& id);
  [[nodiscard]] absl::StatusOr<Sampler*> FindSampler(const Call& call,
                                                     const Id& id);
  [[nodiscard]] absl::StatusOr<UploadedLoss*> FindLoss(const Call& call,
                                                       const Id& id);
  // Returns the caller that made a session, or Caller() if the session is gone.
  [[nodiscard]] Caller CallerOf(const std::string& session) const;
  // Returns the session of a model; empty if the model is gone.
  [[nodiscard]] std::string SessionOf(const std::string& model) const;
  [[nodiscard]] const std::string& model_name() const {
    return port.core()->options.model_name;
  }
  // Returns UNIMPLEMENTED, with what the caller can do instead, if the body
  // asks for what this server does not offer.
  [[nodiscard]] absl::Status CheckOffered(const Json& body) const;
  // Returns UNIMPLEMENTED with --no-tinker-stable-reinforce.
  [[nodiscard]] absl::Status CheckStableReinforce() const;
  // Charges the owner's memory for an entry of a table that has this text. The
  // entry holds the charge. Errors: those of FairBudget::Reserve.
  [[nodiscard]] absl::StatusOr<std::shared_ptr<void>> ChargeEntry(
      const std::string& owner, size_t text_bytes) const;
  // Like ChargeEntry, for an entry that stays even if its owner is over its
  // share by now. Returns null then.
  [[nodiscard]] std::shared_ptr<void> ChargeIfRoom(const std::string& owner,
                                                   size_t text_bytes) const {
    return ChargeEntry(owner, text_bytes).value_or(nullptr);
  }
  // Returns the names of the base model: model_name(), then --model-alias.
  [[nodiscard]] std::vector<std::string> model_names() const;

  EnginePort port;
  const Ledger ledger;
  Futures futures;
  const Futures::After after;
  // The memory budget of unfinished steps and samples.
  const std::shared_ptr<FairBudget> waiting;
  // Those who wait until the request of a future is on disk, by its id; until a
  // session is, by owner and idempotency key (without a key, session id); until
  // a model is, by its id; until a custom loss is, by its id.
  Writes writes;
  std::map<std::string, Session> sessions;
  std::map<std::string, Model> models;
  std::map<std::string, Sampler> samplers;
  std::map<std::string, UploadedLoss> losses;
  uint64_t sampler_uses = 0;  // Counts the uses of all samplers (TouchSampler).
  // The extras of checkpoints (checkpoints.h).
  std::map<std::string, KeptExtras> extras;
  std::set<std::string> copying;  // The owners whose copy is not finished.
  std::map<UsageKey, UsageRow> usage;
  // The events of each owner by their times, in nanoseconds (accounts.h).
  std::map<std::string, std::map<int64_t, KeptEvent>> events;
  // Handles that cancel the engine's samples, by owner and future id.
  std::map<std::string, CancelHandle> cancels;
  std::map<std::string, LoadedAdapter> loaded;  // Keys have owner and adapter.
  std::map<std::string, Orphan> orphans;        // Keys have owner and adapter.
  TurnPool files{2, 64};  // Reads the files that clients download.
  // True when the tables have the ledger's entries, except steps.
  bool restored = false;
  // True when RestoreSteps has handled all steps of the ledger.
  bool ready = false;
  // Inflates and parses large bodies, one at a time. Their memory is limited,
  // not their number. Ends before what it reads for.
  TurnPool bodies{1, std::numeric_limits<size_t>::max()};
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_FRONT_H_
