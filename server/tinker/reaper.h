// Deletes adapters that nobody needs any more. If the engine refuses, because
// it drains or the tenant has too many calls, it tries again until the adapter
// is gone. The ledger keeps what is to be deleted, also over a restart.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_REAPER_H_
#define WEFT_SERVER_TINKER_REAPER_H_

#include <functional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// Deletes an adapter once, without a record. Errors: as EnginePort::Call.
[[nodiscard]] absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                                           const std::string& adapter,
                                           Callback<bool> done);

// Deletes the caller's adapter, now or later, and calls `gone` when it is gone.
void Reap(Front& front, const Caller& caller, const std::string& adapter,
          std::function<void()> gone = nullptr);

// Returns whether the adapter is yet to be deleted.
[[nodiscard]] bool IsOrphan(const Front& front, const Caller& caller,
                            const std::string& adapter);

// Writes to the ledger that the next process must delete the adapter, unless
// Spare comes first.
void Doubt(Front& front, const Caller& caller, const std::string& adapter);
// Erases the record of Doubt.
void Spare(Front& front, const Caller& caller, const std::string& adapter);

// Tries all deletions again that have not succeeded.
void SweepOrphans(Front& front);
// Reads from the ledger the adapters to delete, except those that `is_used`,
// whose records it erases. It waits for the disk.
void RestoreOrphans(
    Front& front,
    const std::function<bool(const std::string& owner,
                             const std::string& adapter)>& is_used);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_REAPER_H_
