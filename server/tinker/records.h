// The entries of the tables of the Tinker front (front.h).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_RECORDS_H_
#define WEFT_SERVER_TINKER_RECORDS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/call/call.h"
#include "server/call/engine_port.h"
#include "server/tinker/futures.h"
#include "server/tinker/wire/fields.h"
#include "src/request/reply.h"

namespace weft::server::tinker {

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
  std::shared_ptr<void> charge;  // Ledger::Charge.
  // The ledger's entry (Ledger::Version); null until it was looked at.
  std::shared_ptr<const std::string> version;
};

// Begins work, and passes its result to `done` later. If a Task returns an
// error, nothing has begun and `done` does not run.
using Task = std::function<absl::Status(Callback<FutureResult> done)>;

// Gives a step to the engine, as a call of `origin`. If it returns an error,
// the engine has not taken the step and `done` does not run.
using StepDone = Callback<StepReply<StepResultPtr>>;
using StepStart =
    std::function<absl::Status(const CallOrigin& origin, const StepDone& done)>;

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
  std::string optimizer;  // See ReadOptimizer (optimizers.h).
  // The loads of a checkpoint with its optimizer that the engine has. Until
  // they end, the engine alone checks the optimizers of steps.
  int loads = 0;
  std::string user_metadata;     // ShownField.
  std::shared_ptr<void> charge;  // Ledger::Charge.
  bool made = false;             // The adapter exists.
  bool making = false;           // The request that makes it has not ended.
};

// A sampling session: the weights that a sampling client samples from.
struct Sampler {
  std::string id;
  std::string owner;
  std::string session;
  std::string adapter;   // Empty for the base model, or with a model_path.
  std::string snapshot;  // Empty: no snapshot, but the current weights.
  // Samples follow the adapter; `snapshot` is released.
  bool in_flight = false;
  std::string model_path;        // Empty if not made from a checkpoint.
  int64_t created_ns = 0;        // When it was created; 0: at any time.
  absl::Time used;               // The last use, a SteadyNow.
  std::shared_ptr<void> charge;  // Ledger::Charge.
};

// The fields of a sampling session that the ledger keeps.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Sampler, session, adapter,
                                                snapshot, in_flight, model_path,
                                                created_ns)

// A custom loss that a client has uploaded (training.h).
struct UploadedLoss {
  std::string owner;
  std::string session;
  std::string loss;              // A serialized v1::CustomLoss.
  std::shared_ptr<void> charge;  // Ledger::Charge.
};

// A sample that the engine has.
struct RunningSample {
  std::string owner;
  CancelHandle cancel;
  bool unwanted = false;  // SweepSamples has cancelled it.
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_RECORDS_H_
