// Keeps what clients of this front did to checkpoints: the newest kMaxEvents of
// each owner, also across restarts. weftd's log has an audit line for each call
// that changes something, over gRPC, too.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_AUDIT_H_
#define WEFT_SERVER_TINKER_AUDIT_H_

#include <cstddef>
#include <string>

#include "absl/time/time.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr size_t kMaxEvents = 1000;

// Keeps an event of a checkpoint. `action` is what was done: "create", "copy",
// "read" or "delete". `purpose` says why it was read; else empty.
void NoteEvent(Front& front, const Caller& caller, const char* action,
               const CheckpointPath& path, const char* purpose = "");

// Reads the events from the ledger.
void RestoreEvents(Front& front);

// Responds with the caller's events of one day of UTC, oldest first, in the
// form of the SDK's type AuditLogResponse. A caller that sees all adapters gets
// those of all owners. The query has `day` (default: today) and `event_type`.
[[nodiscard]] absl::Status GetAuditLog(Front& front, const CallPtr& call,
                                       const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_AUDIT_H_
