// Keeps what the front needs again after a restart: sessions, models and the
// requests that make them, samplers, custom losses, adapters to delete, and
// what tenants have used and done. Each entry is a note of the engine's log
// (src/request/note.h). Without --state-dir nothing is kept. Restores the front
// from it after a restart. The engine itself keeps the steps (KeepStep).
// Threads: the front's. REQUIRES: the engine is ready.
#ifndef WEFT_SERVER_TINKER_LEDGER_H_
#define WEFT_SERVER_TINKER_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/call/caller.h"
#include "server/call/engine_port.h"
#include "server/tinker/wire/fields.h"

namespace weft::server::tinker {

struct Front;

enum class EntryKind : uint8_t {
  kSession,
  kModel,
  kSampler,
  // An adapter that is to be deleted (adapters.h).
  kOrphan,
  // The request that makes a model, until its end. The id is the model's, and
  // the bytes are the body.
  kMaking,
  // A custom loss; its bytes are UploadedLoss::loss.
  kLoss,
  // What a tenant has used and done (accounts.h).
  kUsage,
  kEvent,
  kSecret,  // What Sign signs with (credentials.h).
};

struct LedgerEntry {
  std::string id;
  Json fields;
  std::string bytes = {};
};

class Ledger {
 public:
  explicit Ledger(const EnginePort* port) : port_(*port) {}

  // Keeps the entry, and replaces an entry that has the same kind and id.
  // `done` gets OK when the entry is on disk, or RESOURCE_EXHAUSTED if the disk
  // has no room. Without --state-dir, `done` runs before Put returns.
  void Put(EntryKind kind, const LedgerEntry& entry,
           std::function<void(absl::Status)> done) const;
  // Erases an entry. If the process crashes within seconds, the entry may stay.
  void Erase(EntryKind kind, const std::string& id) const;
  // Returns the entries of a kind whose ids begin with `prefix`, in any order.
  std::vector<LedgerEntry> ReadAll(EntryKind kind,
                                   const std::string& prefix = "") const;
  // Returns what stands for the entry as it is: another pointer, if it was
  // replaced, or has gone to another log and come back. Null if there is none.
  // REQUIRES: no other id begins with `id`.
  std::shared_ptr<const std::string> Version(EntryKind kind,
                                             const std::string& id) const;
  // Returns the ids of the entries of a kind.
  std::vector<std::string> Ids(EntryKind kind) const;
  // Charges the owner's memory for an entry of a table that has this text. The
  // entry holds the charge. Errors: those of FairBudget::Reserve.
  absl::StatusOr<std::shared_ptr<void>> Charge(const std::string& owner,
                                               size_t text_bytes) const;
  // Like Charge, for an entry that stays even if its owner is over its share by
  // now. Returns null then.
  [[nodiscard]] std::shared_ptr<void> ChargeIfRoom(const std::string& owner,
                                                   size_t text_bytes) const {
    return Charge(owner, text_bytes).value_or(nullptr);
  }
  // Returns false without --state-dir.
  bool keeps() const { return port_.core()->options.keeps_state; }

 private:
  engine::Engine& engine() const { return *port_.core()->engine.Peek(); }

  const EnginePort& port_;
};

// Those who wait for the end of a write to the ledger, by a key: all requests
// that ask for the same entry meanwhile.
class Writes {
 public:
  using Done = std::function<void(const absl::Status&)>;
  // Begins a write, for whose end `done` waits.
  void Begin(const std::string& key, Done done) {
    waiting_[key].push_back(std::move(done));
  }
  // Adds `done` if a write of this key has begun. Otherwise returns false.
  [[nodiscard]] bool Join(const std::string& key, Done done) {
    if (!Has(key)) return false;
    Begin(key, std::move(done));
    return true;
  }
  bool Has(const std::string& key) const { return waiting_.contains(key); }
  // Ends the write, and passes its outcome to all who wait, if any.
  void End(const std::string& key, const absl::Status& outcome) {
    const auto waiting = waiting_.extract(key);
    if (waiting.empty()) return;
    for (const Done& done : waiting.mapped()) done(outcome);
  }

 private:
  std::map<std::string, std::vector<Done>> waiting_;
};

// Returns the JSON that the ledger keeps of a caller: the token's id, the
// tenant, and whether the caller is an admin, so that the front can act for the
// caller after a restart. The JSON has no secret. Threads: any.
Json CallerToJson(const Caller& caller);
// Converts the JSON of CallerToJson to a caller. Returns Caller() if the JSON
// has no tenant.
Caller CallerFromJson(const Json& json);

// Takes the secret of earlier processes, and of those with the state's other
// logs, or keeps this one's for them (credentials.h). Then runs `then`, on the
// front's thread. REQUIRES: the engine is ready.
void RestoreSecret(Front& front, const std::function<void()>& then);

// Restores sessions, models, sampling sessions, custom losses, adapters to
// delete and accounts. Then sets Front::restored. REQUIRES: the engine is
// ready.
void RestoreTables(Front& front);

// Brings the tables in line with the ledger if the session has come from
// another log (src/request/move_unit.h), or has gone there. SyncSessions does
// so for all sessions.
void SyncSession(Front& front, const std::string& id);
void SyncSessions(Front& front);

// Waits until the adapters of all models are restored. Then makes the models
// that are not made, and has futures wait for the steps that the engine runs
// again. Then sets Front::ready.
void RestoreSteps(Front& front);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_LEDGER_H_
