// Counts what each tenant uses through this front, by the hour and the session.
// The ledger keeps the counts, as of the last minute.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_USAGE_H_
#define WEFT_SERVER_TINKER_USAGE_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "server/tinker/front.h"

namespace weft::tinker {

// A count is forgotten after this time.
inline constexpr absl::Duration kUsageTime = absl::Hours(30 * 24);
// The most counts of one owner. Beyond that, more sessions of an hour count as
// work without a session.
inline constexpr int64_t kMaxUsageRows = 4096;

// Adds to the counts of the hour. `session` may be empty.
void CountUsage(Front& front, const std::string& owner,
                const std::string& session, const UsageCounts& counts);

// Writes the counts that have changed to the ledger, and forgets old ones.
void SweepUsage(Front& front, absl::Time now);
// Reads the counts from the ledger.
void RestoreUsage(Front& front);

// Responds with the counts of the hours [starting_on, ending_before) of the
// query, in the form of the SDK's type BillingUsageResponse, without prices. A
// caller gets its owner's, and one that sees all adapters those of all owners.
// Errors: INVALID_ARGUMENT unless both are whole hours, at most 14 days apart,
// and the first is not in the future.
[[nodiscard]] absl::Status GetUsage(Front& front, const CallPtr& call,
                                    const Respond& respond);
// Responds with the number and the bytes of the caller's checkpoints.
[[nodiscard]] absl::Status GetStorage(Front& front, const CallPtr& call,
                                      const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_USAGE_H_
