// The entries of the front's tables (front.h).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ENTRIES_H_
#define WEFT_SERVER_TINKER_ENTRIES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/caller.h"
#include "server/tinker/fields.h"
#include "server/tinker/step_line.h"

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
  std::shared_ptr<void> charge;  // ChargeEntry.
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
  std::string adapter;     // Empty for the base model.
  std::string snapshot;    // Empty: no snapshot, but the current weights.
  std::string model_path;  // Empty if not made from a checkpoint.
  uint64_t used = 0;       // A later use sets a higher number (TouchSampler).
  std::shared_ptr<void> charge;  // ChargeEntry.
};

// The extras of a checkpoint (checkpoint_extras.h).
struct KeptExtras {
  Json fields;  // LedgerEntry::fields, but with ShownField's text.
  std::shared_ptr<void> charge;  // ChargeEntry.
};

// An adapter that the front loads for sampling sessions (loaded_adapters.h).
struct LoadedAdapter {
  enum class State : uint8_t { kLoading, kReady, kLeaving };
  State state = State::kLoading;
  // Counts the sampling sessions that use the adapter, not those in `waiting`.
  int users = 0;
  // Callbacks for the end of the load, one per sampling session that waits. If
  // `state` is kLeaving, the load begins after the adapter's deletion.
  std::vector<std::function<void(const absl::Status&)>> waiting;
};

// An adapter that is to be deleted (reaper.h).
struct Orphan {
  Caller caller;
  std::string adapter;
  // True while the engine handles a request to delete the adapter.
  bool running = false;
  // Callbacks that run when the adapter is deleted.
  std::vector<std::function<void()>> gone;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ENTRIES_H_
