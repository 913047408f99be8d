// Loads adapters from checkpoints for sampling sessions. All sampling sessions
// that an owner makes from one checkpoint share an adapter. The front deletes
// the adapter when the last of these sessions ends. A session that comes later
// loads another one, of another name.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_
#define WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_

#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// The names of adapters that are loaded for sampling begin with this prefix.
inline constexpr char kSamplerAdapterPrefix[] = "tinker-sampler.";

// Gives `done` the name of the checkpoint's adapter, which is loaded if it is
// not there, and counts one more user (LoadedAdapter::users). A checkpoint that
// was overwritten has another adapter, and older sessions keep theirs. Runs
// `done` when the adapter is ready or the load has failed, perhaps before
// UseAdapter returns. If `done` gets an error, no user is counted.
void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info, Callback<std::string> done);
// Returns false if UseAdapter would load the checkpoint.
[[nodiscard]] bool HasCheckpoint(const Front& front, const std::string& owner,
                                 const CheckpointInfo& info);
// Has the next process delete a loaded adapter, unless a sampling session of
// that process uses it.
void GoAtNextStart(Front& front, const Caller& caller,
                   const std::string& adapter);
// Subtracts one user. If no user is left, has the adapter deleted.
void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter);
// Counts a user of an adapter that the front loaded before the restart. Call it
// before the front's thread starts.
void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter);
// Returns true if Front::loaded has the adapter.
[[nodiscard]] bool IsLoaded(const Front& front, const std::string& owner,
                            const std::string& adapter);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_
