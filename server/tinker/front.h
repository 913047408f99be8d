// The state that all handlers of the Tinker front share, and a request to them.
// Threads: only the front's thread uses what is declared here.
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
#include "server/tinker/body_budget.h"
#include "server/tinker/disk_pool.h"
#include "server/tinker/engine_port.h"
#include "server/tinker/fields.h"
#include "server/tinker/futures.h"
#include "server/tinker/ledger.h"
#include "server/tinker/owner.h"
#include "server/tinker/sample_queue.h"
#include "server/tinker/step_line.h"

namespace weft::tinker {

// A client's session. It lives from create_session until the client finishes it
// or its heartbeats stop.
struct Session {
  std::string id;
  Caller caller;
  std::string owner;  // OwnerKey(caller).
  Json fields;        // The body of create_session.
  absl::Time last_beat;
};

// A model in training: an adapter, and how sequence numbers become its steps.
struct Model {
  std::string id;
  Caller caller;
  std::string owner;
  std::string session;
  std::string adapter;
  Json user_metadata;
  // Pairs (first, offset): sequence number s is step s + offset, where the last
  // pair with first <= s counts. Each load adds a pair, because it sets the
  // model back to the steps of its checkpoint. The pairs of the last two loads
  // are kept.
  std::vector<std::pair<int64_t, int64_t>> offsets;
  // The number of a load whose end is not on record yet; 0 if there is none.
  int64_t begun_load = 0;
  StepLine line;

  // Returns the adapter's step for a sequence number.
  [[nodiscard]] uint64_t StepOf(int64_t seq) const;
};

// A sampling session: the weights that a sampling client samples from.
struct Sampler {
  std::string id;
  std::string owner;
  std::string session;
  std::string adapter;     // Empty for the base model.
  std::string snapshot;    // Empty for the adapter's current weights.
  std::string model_path;  // The checkpoint that it was made from, if any.
  uint64_t used = 0;       // Sessions used later have higher values.
};

// An adapter that was loaded from a checkpoint, to sample (loaded_adapters.h).
struct LoadedAdapter {
  enum class State : uint8_t { kLoading, kReady, kLeaving };
  State state = State::kLoading;
  // The sampling sessions that use it or are being made for it.
  int users = 0;
  // Callbacks of the sampling sessions that wait for the load. While the
  // adapter is being deleted, they wait for its deletion and a new load.
  std::vector<std::function<void(const absl::Status&)>> waiting;
};

// An adapter that is to be deleted (reaper.h).
struct Orphan {
  Caller caller;
  std::string adapter;
  // True while the engine works on the deletion.
  bool running = false;
  // Callbacks that run when the adapter is deleted.
  std::vector<std::function<void()>> gone;
};

// One request on its way to a handler.
struct Call {
  HttpRequest http;
  std::vector<std::string> args;  // The path's parts at the route's asterisks.
  std::map<std::string, std::string> query;
  Json body;  // A JSON object; empty if the body is protobuf.
  Caller caller;
  // The caller may delete adapters, and sample. Only set for the requests that
  // may end a session.
  bool may_delete = false;
  bool may_sample = false;
  bool kept = false;  // The ledger had it; no client waits for it.

  [[nodiscard]] std::string owner() const { return OwnerKey(caller); }
  [[nodiscard]] CallOrigin origin() const {
    return {.caller = caller, .peer = http.peer};
  }
};
using CallPtr = std::shared_ptr<const Call>;

struct Front {
  // `after` runs a function on the front's thread after a delay.
  Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
        std::unique_ptr<Ledger> opened, Futures::After after);

  // Return the caller's entry. Errors: NOT_FOUND, also for another owner's.
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

  EnginePort port;
  const std::unique_ptr<Ledger> ledger;
  Futures futures;
  const Futures::After after;
  // Counts steps that have not ended, and samples until the engine has them.
  const std::shared_ptr<BodyBudget> waiting;
  // Futures whose requests are being written, with the clients that wait for
  // it.
  std::map<std::string, std::vector<Respond>> keeping;
  std::map<std::string, Session> sessions;
  std::map<std::string, Model> models;
  std::map<std::string, Sampler> samplers;
  // Counts the uses of all samplers; Sampler::used is taken from it.
  uint64_t sampler_uses = 0;
  // The extras of checkpoints, as the ledger has them (checkpoint_extras.h).
  std::map<std::string, Json> extras;
  // Samples that wait for room in the engine.
  SampleQueue samples;
  // True while a timer is set that tries waiting samples again.
  bool samples_come_again = false;
  // Handles that cancel the samples in the engine, by owner and future's id.
  std::map<std::string, CancelHandle> cancels;
  std::map<std::string, LoadedAdapter> loaded;  // Keys have owner and adapter.
  std::map<std::string, Orphan> orphans;        // Keys have owner and adapter.
  // The threads that read the files that clients download.
  DiskPool files{2, 256};
  // True when the front has taken up all steps of the ledger.
  bool ready = false;
};

// Handles one request. It calls the Respond now or later, or it returns an
// error, which becomes the reply.
using Handler = absl::Status (*)(Front&, const CallPtr&, const Respond&);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_FRONT_H_
