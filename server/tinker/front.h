// What the handlers of the Tinker front share: its tables and a request on its
// way through them.
// Threads: everything here is the front's thread's.
#ifndef WEFT_SERVER_TINKER_FRONT_H_
#define WEFT_SERVER_TINKER_FRONT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/tinker/engine_port.h"
#include "server/tinker/fields.h"
#include "server/tinker/futures.h"
#include "server/tinker/ledger.h"
#include "server/tinker/owner.h"

namespace weft::tinker {

// A client's visit, from create_session to finish, or to the end of its
// heartbeats.
struct Session {
  std::string id;
  Caller caller;
  std::string owner;  // OwnerKey of the caller.
  Json fields;        // As the client gave them.
  absl::Time last_beat;
};

// A model in training: an adapter, and how its sequence numbers become steps.
struct Model {
  std::string id;
  std::string owner;
  std::string session;
  std::string adapter;
  Json user_metadata;
  // Sequence number s is step s + offset, by the last entry whose first number
  // is at most s: a load sets a model back to the steps of its checkpoint.
  std::vector<std::pair<int64_t, int64_t>> offsets;
  // The load under way; steps after it are held until its end says which
  // numbers they have.
  std::optional<int64_t> loading;
  std::vector<std::function<void()>> held;

  [[nodiscard]] uint64_t StepOf(int64_t seq) const;
};

// What a sampling session samples from. Never changes, but for kind
// "inflight", which has no snapshot.
struct Sampler {
  std::string id;
  std::string owner;
  std::string session;
  std::string adapter;     // Empty: the base model.
  std::string snapshot;    // Empty: the adapter's latest weights.
  std::string model_path;  // Empty unless made from a checkpoint.
};

// One request on its way to a handler.
struct Call {
  HttpRequest http;
  std::vector<std::string> args;  // What the route's asterisks stand for.
  std::map<std::string, std::string> query;
  Json body;  // An object; of requests that come as JSON.
  Caller caller;

  [[nodiscard]] std::string owner() const { return OwnerKey(caller); }
  [[nodiscard]] CallOrigin origin() const {
    return {.caller = caller, .peer = http.peer};
  }
};
using CallPtr = std::shared_ptr<const Call>;

struct Front {
  Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
        Ledger opened, Futures::After after);

  // Sessions, models and samplers of the caller: NOT_FOUND for another one's.
  [[nodiscard]] absl::StatusOr<Session*> FindSession(const Call& call,
                                                     const std::string& id);
  [[nodiscard]] absl::StatusOr<Model*> FindModel(const Call& call,
                                                 const std::string& id);
  [[nodiscard]] absl::StatusOr<Sampler*> FindSampler(const Call& call,
                                                     const std::string& id);
  // Returns the caller who made a session. Once it is gone, that is anybody.
  [[nodiscard]] Caller CallerOf(const std::string& session) const;
  [[nodiscard]] const std::string& model_name() const {
    return port.core()->options.model_name;
  }

  EnginePort port;
  Ledger ledger;
  Futures futures;
  const Futures::After after;
  std::map<std::string, Session> sessions;
  std::map<std::string, Model> models;
  std::map<std::string, Sampler> samplers;
  // Extras of checkpoints, as the ledger has them (checkpoint_extras.h).
  std::map<std::string, Json> extras;
  // Samples that may be cancelled, by owner and id of the future.
  std::map<std::string, CancelHandle> cancels;
  // The steps that waited when the last process ended run again.
  bool ready = false;
};

// Responds, now or later; or returns the error that is the reply.
using Handler = absl::Status (*)(Front&, const CallPtr&, const Respond&);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_FRONT_H_
