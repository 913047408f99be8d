// Deletes adapters that nobody needs any more, however long the engine refuses:
// it may drain, or the tenant's calls may be at their limit. What is to be
// deleted is on record, and is deleted after a restart.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_REAPER_H_
#define WEFT_SERVER_TINKER_REAPER_H_

#include <functional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

[[nodiscard]] absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                                           const std::string& adapter,
                                           Callback<bool> done);

// Deletes the caller's adapter, now or later, and then calls `gone`.
void Reap(Front& front, const Caller& caller, const std::string& adapter,
          std::function<void()> gone = nullptr);

// Puts on record that the adapter is to be deleted unless Spare comes before
// the process ends.
void Doubt(Front& front, const Caller& caller, const std::string& adapter);
void Spare(Front& front, const Caller& caller, const std::string& adapter);

// Tries again what has failed so far.
void SweepOrphans(Front& front);
// Takes up the adapters of the ledger but for those that `is_used`.
void RestoreOrphans(
    Front& front,
    const std::function<bool(const std::string& owner,
                             const std::string& adapter)>& is_used);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_REAPER_H_
