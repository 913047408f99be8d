// The manifest of a log in an object store: who owns the log, and where it
// begins. Each change is a swap of the object, so of all processes that want to
// change a version exactly one succeeds.
#ifndef WEFT_SRC_LOG_BUCKET_MANIFEST_H_
#define WEFT_SRC_LOG_BUCKET_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace weft::log {

// A process that may own a log.
struct Instance {
  std::string name;     // Of --instance: the same after a restart.
  std::string process;  // Random, of this process alone.
  std::string address;  // HOST:PORT at which clients reach its gRPC.
};

// The newest snapshot.
struct SnapshotPlace {
  std::string name;            // Empty before the first one.
  uint64_t next_sequence = 1;  // The first record that it does not contain.
  uint64_t place = 1;          // The object from which on the log is read.
};

struct Manifest {
  uint64_t epoch = 0;    // Counts the owners.
  uint64_t version = 0;  // Counts the changes, so that no two are equal.
  Instance owner;
  bool released = false;  // The owner has ended and writes no more.
  bool drained = false;   // Its adapters have left, and nobody takes the log.
  // SampleLoad::queued_tokens of the owner, at its latest beat.
  std::optional<uint64_t> queued_tokens;
  SnapshotPlace snapshot;
};

std::string EncodeManifest(const Manifest& manifest);
// Errors: DATA_LOSS.
absl::StatusOr<Manifest> DecodeManifest(const std::string& bytes);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_MANIFEST_H_
