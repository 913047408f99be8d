// Says who a caller is, and what its tenant has used and done through this
// front. Makes ids and signatures.
// Threads: the front's for what takes a Front, else any.
#ifndef WEFT_SERVER_TINKER_ACCOUNTS_H_
#define WEFT_SERVER_TINKER_ACCOUNTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/front.h"

namespace weft::server::tinker {

// Returns 128 random bits in hex. Ids name adapters, folders and futures, so
// none may repeat. Errors: INTERNAL if the system has no random bits.
[[nodiscard]] absl::StatusOr<std::string> NewId();

// Returns the HMAC-SHA256 of `text` in hex, with a secret that each process
// draws anew. It signs download URLs, JWTs and the ids of samples' futures, so
// that nobody can guess one. Errors: INTERNAL if the system has no random bits
// for the secret.
[[nodiscard]] absl::StatusOr<std::string> Sign(const std::string& text);

// Compares a signature with the one that a client gave, in constant time.
[[nodiscard]] bool IsSignature(absl::string_view given,
                               const std::string& signature);

// The SDK exchanges an API key for a short-lived token (JWT), which it then
// sends in its place. A JWT names the access token by its hash, so it permits
// what the access token permits, and no longer than that. Signatures are of
// this process: after a restart the SDK exchanges its key again.
//
// Every JWT begins with this, and no API key does.
inline constexpr char kJwtPrefix[] = "eyJ";
inline constexpr absl::Duration kJwtLifetime = absl::Hours(1);

// Returns a JWT of the caller whose access token has this hash (HashToken;
// empty on a server without tokens). Errors: those of Sign.
[[nodiscard]] absl::StatusOr<std::string> MakeJwt(const Caller& caller,
                                                  const std::string& token_hash,
                                                  absl::Time now);
// Returns MakeJwt's `token_hash`. Errors: UNAUTHENTICATED if this process has
// not made the JWT, or if it has expired.
[[nodiscard]] absl::StatusOr<std::string> ReadJwt(absl::string_view jwt,
                                                  absl::Time now);

// What each tenant uses is counted by the hour and the session. The ledger
// keeps the counts, as of the last minute. A count is forgotten after this
// time.
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

// The newest events of each owner's checkpoints that are kept, also across
// restarts. weftd's log has an audit line for each call that changes something,
// over gRPC, too.
inline constexpr size_t kMaxEvents = 1000;

// Keeps an event of a checkpoint. `action` is what was done: "create", "copy",
// "read" or "delete". `purpose` says why it was read; else empty.
void NoteEvent(Front& front, const Caller& caller, const char* action,
               const CheckpointPath& path, const char* purpose = "");
// Reads the events from the ledger.
void RestoreEvents(Front& front);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_ACCOUNTS_H_
