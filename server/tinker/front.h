// The state that all handlers of the Tinker front share, and the form in which
// a handler gets its request.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_FRONT_H_
#define WEFT_SERVER_TINKER_FRONT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/call/call.h"
#include "server/call/engine_port.h"
#include "server/http/fair_budget.h"
#include "server/http/message.h"
#include "server/tinker/fields.h"
#include "server/tinker/futures.h"
#include "server/tinker/ledger.h"
#include "server/tinker/records.h"
#include "server/tinker/turns.h"

namespace weft::server::tinker {

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
  std::string token_hash;  // Of the caller's access token; empty without one.
  std::string jwt;    // What the caller sent in place of an API key, or empty.
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
  // Return the model; nullptr if there is none.
  [[nodiscard]] Model* FindModel(const std::string& id);
  [[nodiscard]] const Model* FindModel(const std::string& id) const;
  // Returns whether the caller's token has the scope that the RPC needs. True
  // on a server without tokens.
  [[nodiscard]] bool Permits(const Call& call, Rpc rpc) const;
  // Returns the caller that made a session, or Caller() if the session is gone.
  [[nodiscard]] Caller CallerOf(const std::string& session) const;
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
  // Those who wait until the request of a future is on disk, by its id; until a
  // session is, by owner and idempotency key (without a key, session id); until
  // a custom loss is, by its id.
  Writes writes;
  std::map<std::string, Session> sessions;
  std::map<std::string, Model> models;
  std::map<std::string, Sampler> samplers;
  std::map<std::string, UploadedLoss> losses;
  uint64_t sampler_uses = 0;  // Counts the uses of all samplers (TouchSampler).
  // The extras of checkpoints (checkpoints.h).
  std::map<std::string, CheckpointExtras> extras;
  std::set<std::string> copying;  // The owners whose copy is not finished.
  std::map<UsageKey, UsageRow> usage;
  // The events of each owner by their times, in nanoseconds (accounts.h).
  std::map<std::string, std::map<int64_t, KeptEvent>> events;
  std::map<std::string, RunningSample> running;  // By future id.
  std::map<std::string, LoadedAdapter> loaded;   // Keys have owner and adapter.
  std::map<std::string, Orphan> orphans;         // Keys have owner and adapter.
  TurnPool files{2};       // Reads the files that clients download.
  size_t num_opening = 0;  // Downloads whose files `files` opens.
  // True when the tables have the ledger's entries, except steps.
  bool restored = false;
  // True when RestoreSteps has handled all steps of the ledger.
  bool ready = false;
  // Inflates and parses large bodies, and has the engine read records of
  // samples, one at a time. Ends before what it reads for.
  TurnPool bodies{1};
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_FRONT_H_
