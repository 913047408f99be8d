// Loads adapters from checkpoints for sampling sessions. All sampling sessions
// that an owner makes from one checkpoint share an adapter. The front deletes
// the adapter when the last of these sessions ends. A session that comes during
// the deletion waits, and then loads the adapter again.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_
#define WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_

#include <functional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// The names of adapters that are loaded for sampling begin with this prefix.
inline constexpr char kSamplerAdapterPrefix[] = "tinker-sampler.";

// Returns the name of the adapter for a checkpoint. The name depends on the
// time when the checkpoint was saved. So after a checkpoint is overwritten, new
// sampling sessions load another adapter, and older ones keep theirs.
// Threads: any.
[[nodiscard]] std::string AdapterOfCheckpoint(const CheckpointInfo& info);

// Loads the checkpoint's adapter if it is not loaded, and counts one more user
// (LoadedAdapter::users). Runs `done` when the adapter is ready or the load has
// failed, perhaps before UseAdapter returns. If `done` gets an error, no user
// is counted.
void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info,
                std::function<void(const absl::Status&)> done);
// Subtracts one user. If no user is left and no session waits for the adapter,
// has the adapter deleted.
void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter);
// Counts a user of an adapter that the front loaded before the restart. Call it
// before the front's thread starts.
void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter);
// Returns true if Front::loaded has the adapter, in any state.
[[nodiscard]] bool IsLoaded(const Front& front, const std::string& owner,
                            const std::string& adapter);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_
