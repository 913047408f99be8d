// The state that all handlers of the Tinker front share, and the form in which
// a handler gets its request.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_FRONT_H_
#define WEFT_SERVER_TINKER_FRONT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine_port.h"
#include "server/http/fair_budget.h"
#include "server/tinker/body_turns.h"
#include "server/tinker/disk_pool.h"
#include "server/tinker/entries.h"
#include "server/tinker/fields.h"
#include "server/tinker/futures.h"
#include "server/tinker/ledger.h"
#include "server/tinker/owner.h"
#include "server/tinker/sample_queue.h"

namespace weft::tinker {

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
  // Set only for requests that can end a session or that retrieve a future,
  // because no other request needs them.
  bool may_delete = false;
  bool may_sample = false;
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

  // Return the caller's entry. Errors: NOT_FOUND, also if another owner has it.
  [[nodiscard]] absl::StatusOr<Session*> FindSession(const Call& call,
                                                     const std::string& id);
  [[nodiscard]] absl::StatusOr<Model*> FindModel(const Call& call,
                                                 const std::string& id);
  [[nodiscard]] absl::StatusOr<Sampler*> FindSampler(const Call& call,
                                                     const std::string& id);
  // Returns the caller that made a session, or Caller() if the session is gone.
  [[nodiscard]] Caller CallerOf(const std::string& session) const;
  [[nodiscard]] const std::string& model_name() const {
    return port.core()->options.model_name;
  }
  // Charges the owner's memory for an entry of a table that has this text. The
  // entry holds the charge. Errors: those of FairBudget::Reserve.
  [[nodiscard]] absl::StatusOr<std::shared_ptr<void>> ChargeEntry(
      const std::string& owner, size_t text_bytes) const;
  // Returns the names of the base model: model_name(), then --model-alias.
  [[nodiscard]] std::vector<std::string> model_names() const;

  EnginePort port;
  const Ledger ledger;
  Futures futures;
  const Futures::After after;
  // The memory budget of unfinished steps, and of the samples in `samples`.
  const std::shared_ptr<FairBudget> waiting;
  // Clients that wait until a future's request is on disk, by future id.
  std::map<std::string, std::vector<Respond>> keeping;
  std::map<std::string, Session> sessions;
  // Clients that wait until a session is on disk, by owner and idempotency key.
  // Without a key, by owner and session id.
  std::map<std::string, std::vector<Respond>> making_sessions;
  std::map<std::string, Model> models;
  // Callbacks of requests that wait until a model is on disk, by model id.
  std::map<std::string, std::vector<std::function<void(absl::Status)>>> opening;
  std::map<std::string, Sampler> samplers;
  uint64_t sampler_uses = 0;  // Counts the uses of all samplers (TouchSampler).
  // The extras of checkpoints (checkpoint_extras.h).
  std::map<std::string, KeptExtras> extras;
  // Samples that wait for room in the engine.
  SampleQueue samples;
  // True while a timer is set that tries waiting samples again.
  bool samples_come_again = false;
  // Handles that cancel the engine's samples, by owner and future id.
  std::map<std::string, CancelHandle> cancels;
  std::map<std::string, LoadedAdapter> loaded;  // Keys have owner and adapter.
  std::map<std::string, Orphan> orphans;        // Keys have owner and adapter.
  DiskPool files{2, 64};  // Reads the files that clients download.
  // True when the tables have the ledger's entries, except steps.
  bool restored = false;
  // True when RestoreSteps has handled all steps of the ledger.
  bool ready = false;
  BodyTurns bodies{after};  // Ends before what it reads for.
};

// Handles one request. Calls `Respond` once, now or later. If the handler
// returns an error instead, its caller responds with the error.
using Handler = absl::Status (*)(Front&, const CallPtr&, const Respond&);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_FRONT_H_
