// What the front must find again after a restart: sessions, models, samplers,
// checkpoints' extras, and the requests of steps whose clients wait.
//
// One file per entry in a folder of its own under --state-dir, whole or not
// there; without a folder nothing is kept.
// Threads: the front's. Writes block on the disk.
#ifndef WEFT_SERVER_TINKER_LEDGER_H_
#define WEFT_SERVER_TINKER_LEDGER_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/tinker/fields.h"
#include "src/files/file_io.h"

namespace weft::tinker {

enum class EntryKind : uint8_t {
  kSession,
  kModel,
  kSampler,
  kCheckpoint,
  kStep,
};

struct LedgerEntry {
  std::string id;
  Json fields;
  std::string bytes;  // A request's body.
};

class Ledger {
 public:
  // Makes the folder STATE_DIR/tinker; an empty `state_dir` keeps nothing.
  // Errors: those of src/files/file_io.h.
  [[nodiscard]] static absl::StatusOr<Ledger> Open(
      const std::string& state_dir);

  // Replaces the entry of this id. On disk when it returns.
  [[nodiscard]] absl::Status Put(EntryKind kind, const LedgerEntry& entry);
  // May be without effect after a crash.
  void Erase(EntryKind kind, const std::string& id);
  // The entries of a kind, in any order. One that cannot be read is left out,
  // with a line in the log.
  [[nodiscard]] std::vector<LedgerEntry> ReadAll(EntryKind kind) const;
  // False: nothing is kept.
  [[nodiscard]] bool keeps() const { return folder_.get() >= 0; }

 private:
  Ledger() = default;

  UniqueFd folder_;
  std::string path_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_LEDGER_H_
