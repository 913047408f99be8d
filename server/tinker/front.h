// The state that all handlers of the Tinker front share, and the form in which
// a handler gets its request.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_FRONT_H_
#define WEFT_SERVER_TINKER_FRONT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/call/call.h"
#include "server/call/engine_port.h"
#include "server/http/message.h"
#include "server/tinker/accounts.h"
#include "server/tinker/adapters.h"
#include "server/tinker/futures.h"
#include "server/tinker/ledger.h"
#include "server/tinker/records.h"
#include "server/tinker/table.h"
#include "server/tinker/transfers.h"
#include "server/tinker/wire/fields.h"
#include "src/base/threads/worker.h"

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

  std::string owner() const { return OwnerKey(caller); }
  CallOrigin origin() const { return {.caller = caller, .peer = http.peer}; }
};
using CallPtr = std::shared_ptr<const Call>;

struct Front {
  // `after` runs a function on the front's thread after a delay.
  Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
        Futures::After after);
  ~Front();

  // Returns whether the caller's token has the scope that the RPC needs. True
  // on a server without tokens.
  bool Permits(const Call& call, Rpc rpc) const;
  // Returns the caller that made a session, or Caller() if the session is gone.
  Caller CallerOf(const std::string& session) const;
  const std::string& model_name() const {
    return port.core()->options.model_name;
  }
  // Returns UNIMPLEMENTED, with what the caller can do instead, if the body
  // asks for what this server does not offer.
  absl::Status CheckOffered(const Json& body) const;
  // Returns UNIMPLEMENTED with --no-tinker-stable-reinforce.
  absl::Status CheckStableReinforce() const;
  // Returns the names of the base model: model_name(), then --model-alias.
  std::vector<std::string> model_names() const;

  EnginePort port;
  const Ledger ledger;
  Accounts accounts{&ledger};
  Adapters adapters{this};
  Futures futures;
  const Futures::After after;
  // Those who wait until the request of a future is on disk, by its id; until a
  // session is, by owner and idempotency key (without a key, session id); until
  // a custom loss is, by its id.
  Writes writes;
  Table<Session> sessions{"session"};
  Table<Model> models{"model"};
  Table<Sampler> samplers{"sampling session"};
  Table<UploadedLoss> losses{"custom loss"};
  Table<RunningSample> running{"sample"};  // By the ids of their futures.
  Transfers transfers{this};
  Worker files{2};  // Opens and reads the files that clients download.
  // Requests for other logs, until it is known who has them. The engine may
  // outlive the server, so it must hold no Respond.
  std::map<uint64_t, Callback<std::string>> misdirected;
  uint64_t last_misdirected = 0;
  // Sessions that have come from another log, and wait for their models.
  std::set<std::string> arriving;
  // True when the tables have the ledger's entries, except steps.
  bool restored = false;
  // True when RestoreSteps has handled all steps of the ledger.
  bool ready = false;
  // Inflates and parses large bodies, and has the engine read records of
  // samples, one at a time. Ends before what it reads for.
  Worker bodies;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_FRONT_H_
