// Deletes adapters that nobody needs any more. The engine may refuse a
// deletion, for example because it drains. The front then tries again every two
// seconds. The ledger keeps which adapters are to be deleted, so the tries go
// on after a restart.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_REAPER_H_
#define WEFT_SERVER_TINKER_REAPER_H_

#include <functional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// Asks the engine once to delete an adapter, and writes nothing to the ledger.
// Errors: those of EnginePort::Call.
[[nodiscard]] absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                                           const std::string& adapter,
                                           Callback<bool> done);

// Deletes the caller's adapter, now or later.
void DeleteOrphan(Front& front, const Caller& caller,
                  const std::string& adapter);

// Writes to the ledger that the next process must delete the adapter. Call it
// before an adapter is loaded for sampling, so that a crash during the load
// leaves no adapter behind.
void DeleteAtNextStart(Front& front, const Caller& caller,
                       const std::string& adapter);
// Erases the entry that DeleteAtNextStart has written. Call it when the load
// has succeeded.
void KeepAtNextStart(Front& front, const Caller& caller,
                     const std::string& adapter);

// Tries again all deletions that have not succeeded.
void SweepOrphans(Front& front);
// Reads from the ledger which adapters are to be deleted. If `is_used` returns
// true for an adapter, keeps the adapter and erases the adapter's entry.
void RestoreOrphans(
    Front& front,
    const std::function<bool(const std::string& owner,
                             const std::string& adapter)>& is_used);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_REAPER_H_
