// Adapters that the front loads for sampling, and adapters that it deletes.
//
// The engine may refuse a deletion, for example because it drains. The front
// then tries again every two seconds. The ledger keeps which adapters are to be
// deleted, so the tries go on after a restart.
//
// All sampling sessions that an owner makes from one checkpoint share a loaded
// adapter. The front deletes the adapter when the last of these sessions ends.
// A session that comes later loads another one, of another name. From its load
// on, the ledger says that the adapter is to be deleted, and the next process
// does so unless a sampling session of the ledger uses the adapter.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ADAPTERS_H_
#define WEFT_SERVER_TINKER_ADAPTERS_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/call/call.h"
#include "server/call/engine_port.h"
#include "server/wire/tinker_names.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::server::tinker {

struct Call;   // front.h
struct Front;  // front.h

// Asks the engine once to delete an adapter, and writes nothing to the ledger.
// Errors: those of EnginePort::Call.
absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                             const std::string& adapter, Callback<bool> done);

// Asks the engine about an adapter. Errors: those of EnginePort::Call.
absl::Status GetAdapterOf(Front& front, CallOrigin origin,
                          const std::string& adapter,
                          Callback<AdapterInfo> done);

// Longer than most samples take, so that few name an adapter that is gone.
inline constexpr absl::Duration kLease = absl::Minutes(15);

class Adapters {
 public:
  // `front` outlives this object and its calls.
  explicit Adapters(Front* front) : front_(*front) {}

  // Deletes the caller's adapter, now or later.
  void Delete(const Caller& caller, const std::string& adapter);
  // Tries again all deletions that have not succeeded.
  void SweepDeletions();
  // Reads from the ledger which adapters are to be deleted, but for those that
  // a sampling session uses. Call it after RestoreSamplers.
  void Restore();

  // Gives `done` the name of the checkpoint's adapter, which is loaded if it is
  // not there, and counts one more user of it. A checkpoint that was
  // overwritten has another adapter, and older sessions keep theirs. Runs
  // `done` when the adapter is ready or the load has failed, perhaps before Use
  // returns. If `done` gets an error, no user is counted. Else notes that the
  // checkpoint was read, if it was loaded or `note` is set. Errors:
  // INVALID_ARGUMENT for a bad path; those of FindCheckpoint.
  absl::Status Use(const std::shared_ptr<const Call>& call,
                   const std::string& model_path, bool note,
                   const Callback<std::string>& done);
  // Like Use without `note`, but nobody calls Leave: the adapter stays until
  // kLease after the last loan.
  absl::Status Lend(const std::shared_ptr<const Call>& call,
                    const std::string& model_path,
                    const Callback<std::string>& done);
  // Subtracts one user. If no user is left, has the adapter deleted. Does
  // nothing if the front has not loaded the adapter.
  void Leave(const Caller& caller, const std::string& adapter);
  // Counts a user of an adapter that the front loaded before the restart. Call
  // it before the front's thread starts.
  void Have(const Caller& caller, const std::string& adapter);

  size_t num_loaded() const { return loaded_.size(); }
  // Returns the number of adapters that are to be deleted.
  size_t num_deletions() const { return deletions_.size(); }

 private:
  // An adapter that is loaded for sampling sessions.
  struct Loaded {
    bool ready = false;  // The load has ended.
    // The sampling sessions that use the adapter; all its loans are one user.
    int users = 0;
    // When its last loan ends; InfinitePast if it is not lent.
    absl::Time lent_until = absl::InfinitePast();
    // Callbacks for the end of the load, one per sampling session that waits.
    std::vector<Callback<std::string>> waiting;
  };
  using LoadedAdapters = std::map<std::string, Loaded>;

  // An adapter that is to be deleted.
  struct Deletion {
    Caller caller;
    std::string adapter;
    bool running = false;  // The engine handles a request to delete it.
  };

  // Asks the engine to delete the adapter of deletions_[key], unless such a
  // request is running already. An adapter that does not exist counts as
  // deleted.
  void TryToDelete(const std::string& key);
  // Writes to the ledger that the adapter is to be deleted, by the next process
  // if this one does not do it (Restore).
  void DeleteAtNextStart(const Caller& caller, const std::string& adapter);
  // Returns the first of the checkpoint's adapters, or the end of loaded_.
  LoadedAdapters::iterator FindLoaded(const Caller& caller,
                                      const CheckpointInfo& info);
  void StartLoad(const CallOrigin& origin, const CheckpointInfo& info,
                 Callback<std::string> done);
  // Handles the end of a load, and tells the outcome to all who wait.
  void EndLoad(const CallOrigin& origin, const std::string& adapter,
               const absl::Status& loaded);
  // Does what Use does for a checkpoint that was found.
  void UseFound(const CallOrigin& origin, const CheckpointInfo& info,
                Callback<std::string> done);
  // Counts a user of an adapter that is ready. If a client has deleted the
  // adapter over gRPC, loads another one.
  void UseReady(const CallOrigin& origin, const std::string& adapter,
                const CheckpointInfo& info, const Callback<std::string>& done);
  // Subtracts the user that the loans are, when the last of them is over.
  void EndLoans(const Caller& caller, const std::string& adapter);

  Front& front_;
  // Keys have owner and adapter.
  LoadedAdapters loaded_;
  std::map<std::string, Deletion> deletions_;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_ADAPTERS_H_
