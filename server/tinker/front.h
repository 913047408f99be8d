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
  Caller caller;
  std::string owner;
  std::string session;
  std::string adapter;
  Json user_metadata;
  // Sequence number s is step s + offset, by the last entry whose first number
  // is at most s: a load sets a model back to the steps of its checkpoint. The
  // entries of the last two loads.
  std::vector<std::pair<int64_t, int64_t>> offsets;
  // The number of a load that has begun, and may have ended without a trace
  // here. 0: none.
  int64_t begun_load = 0;
  StepLine line;

  [[nodiscard]] uint64_t StepOf(int64_t seq) const;
};

// What a sampling session samples from.
struct Sampler {
  std::string id;
  std::string owner;
  std::string session;
  std::string adapter;     // Empty: the base model.
  std::string snapshot;    // Empty: the adapter's latest weights.
  std::string model_path;  // Empty unless made from a checkpoint.
  uint64_t used = 0;       // Higher: used later.
};

// An adapter that was loaded to sample from; see samplers.h.
struct LoadedAdapter {
  enum class State : uint8_t { kLoading, kReady, kLeaving };
  State state = State::kLoading;
  int users = 0;  // Sampling sessions, and those that are being made.
  // Sessions that wait until it is loaded, or gone so that it can be.
  std::vector<std::function<void(const absl::Status&)>> waiting;
};

// An adapter to delete; see reaper.h.
struct Orphan {
  Caller caller;
  std::string adapter;
  bool running = false;
  std::vector<std::function<void()>> gone;
};

// One request on its way to a handler.
struct Call {
  HttpRequest http;
  std::vector<std::string> args;  // What the route's asterisks stand for.
  std::map<std::string, std::string> query;
  Json body;  // An object; of requests that come as JSON.
  Caller caller;
  bool kept = false;  // It is from the ledger.

  [[nodiscard]] std::string owner() const { return OwnerKey(caller); }
  [[nodiscard]] CallOrigin origin() const {
    return {.caller = caller, .peer = http.peer};
  }
};
using CallPtr = std::shared_ptr<const Call>;

struct Front {
  Front(ServiceCore* core, const std::shared_ptr<HttpServer>& server,
        std::unique_ptr<Ledger> opened, Futures::After after);

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
  const std::unique_ptr<Ledger> ledger;
  Futures futures;
  const Futures::After after;
  // The memory of steps and samples that the engine does not have yet.
  const std::shared_ptr<BodyBudget> waiting;
  // Futures whose requests are being written, with those who wait to hear that
  // they are promised.
  std::map<std::string, std::vector<Respond>> keeping;
  std::map<std::string, Session> sessions;
  std::map<std::string, Model> models;
  std::map<std::string, Sampler> samplers;
  uint64_t sampler_uses = 0;
  // Extras of checkpoints, as the ledger has them (checkpoint_extras.h).
  std::map<std::string, Json> extras;
  // Samples that the engine had no room for.
  SampleQueue samples;
  bool samples_come_again = false;
  // Samples that may be cancelled, by owner and id of the future.
  std::map<std::string, CancelHandle> cancels;
  std::map<std::string, LoadedAdapter> loaded;  // By LoadedKey.
  std::map<std::string, Orphan> orphans;        // By owner and adapter.
  // Reads files that clients download.
  DiskPool files{2, 256};
  // The steps that waited when the last process ended have run again.
  bool ready = false;
};

// Responds, now or later; or returns the error that is the reply.
using Handler = absl::Status (*)(Front&, const CallPtr&, const Respond&);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_FRONT_H_
