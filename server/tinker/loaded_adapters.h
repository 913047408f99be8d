// Adapters that are loaded from checkpoints to sample from. All sampling
// sessions of one checkpoint share one; the last one has it deleted. A session
// that comes meanwhile waits until it is gone, and loads it again.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_
#define WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_

#include <functional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// How their names begin.
inline constexpr char kSamplerAdapterPrefix[] = "tinker-sampler.";

// The name of the adapter for a checkpoint. An overwritten checkpoint is
// another one: sessions of the old one stay as they are.
[[nodiscard]] std::string AdapterOfCheckpoint(const CheckpointInfo& info);

// Loads the checkpoint's adapter if it is not there, and counts a user of it
// unless `done` gets an error.
void UseAdapter(Front& front, const CallOrigin& origin,
                const CheckpointInfo& info,
                std::function<void(const absl::Status&)> done);
// Gives the use back.
void LeaveAdapter(Front& front, const Caller& caller,
                  const std::string& adapter);
// Counts a user of an adapter that was loaded before a restart.
void HaveAdapter(Front& front, const Caller& caller,
                 const std::string& adapter);
[[nodiscard]] bool IsLoaded(const Front& front, const std::string& owner,
                            const std::string& adapter);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_LOADED_ADAPTERS_H_
