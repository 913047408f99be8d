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

#include <string>

#include "server/tinker/front.h"

namespace weft::server::tinker {

// Asks the engine once to delete an adapter, and writes nothing to the ledger.
// Errors: those of EnginePort::Call.
[[nodiscard]] absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                                           const std::string& adapter,
                                           Callback<bool> done);

// Asks the engine about an adapter. Errors: those of EnginePort::Call.
[[nodiscard]] absl::Status GetAdapterOf(Front& front, CallOrigin origin,
                                        const std::string& adapter,
                                        Callback<AdapterInfo> done);

// Deletes the caller's adapter, now or later.
void DeleteOrphan(Front& front, const Caller& caller,
                  const std::string& adapter);

// Tries again all deletions that have not succeeded.
void SweepOrphans(Front& front);
// Reads from the ledger which adapters are to be deleted, but for those that a
// sampling session uses. Call it after RestoreSamplers.
void RestoreOrphans(Front& front);

// The names of adapters that are loaded for sampling begin with this prefix.
inline constexpr char kSamplerAdapterPrefix[] = "tinker-sampler.";

// Gives `done` the name of the checkpoint's adapter, which is loaded if it is
// not there, and counts one more user (LoadedAdapter::users). A checkpoint that
// was overwritten has another adapter, and older sessions keep theirs. Runs
// `done` when the adapter is ready or the load has failed, perhaps before
// UseCheckpoint returns. If `done` gets an error, no user is counted. Else
// notes that the checkpoint was read, if it was loaded or `note` is set.
// Errors: INVALID_ARGUMENT for a bad path; those of FindCheckpoint.
[[nodiscard]] absl::Status UseCheckpoint(Front& front, const CallPtr& call,
                                         const std::string& model_path,
                                         bool note,
                                         const Callback<std::string>& done);
// Subtracts one user. If no user is left, has the adapter deleted. Does nothing
// if the front has not loaded the adapter.
void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter);
// Counts a user of an adapter that the front loaded before the restart. Call it
// before the front's thread starts.
void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter);
}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_ADAPTERS_H_
