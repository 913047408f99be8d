// What the front must find again after a restart: sessions, models, samplers,
// checkpoints' extras, adapters to delete, and the requests of steps whose
// clients wait.
//
// One file per entry in a folder of its own under --state-dir, whole or not
// there; without a folder nothing is kept. One thread writes and erases, in the
// order of the calls; what a call gives back comes on the front's thread.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_LEDGER_H_
#define WEFT_SERVER_TINKER_LEDGER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/tinker/fields.h"
#include "src/base/worker.h"
#include "src/files/file_io.h"

namespace weft::tinker {

enum class EntryKind : uint8_t {
  kSession,
  kModel,
  kSampler,
  kCheckpoint,
  kOrphan,  // An adapter to delete.
  kStep,    // Its id is MODEL:SEQ.
};

struct LedgerEntry {
  std::string id;
  Json fields;
  std::string bytes;  // A request's body.
};

// The request of a step, by its file's name: no file is read to list them.
struct StepFile {
  std::string name;
  int64_t seq = 0;
};

class Ledger {
 public:
  // Has the front's thread do something.
  using Post = std::function<void(std::function<void()>)>;

  // Makes the folder STATE_DIR/tinker; an empty `state_dir` keeps nothing.
  // Errors: those of src/files/file_io.h.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Ledger>> Open(
      const std::string& state_dir, Post post);

  // Replaces the entry of this id. `done` runs when it is on disk, or cannot
  // be; RESOURCE_EXHAUSTED with a reason that passes when too many bytes wait
  // to be written. Without a folder it runs at once.
  void Put(EntryKind kind, LedgerEntry entry,
           std::function<void(absl::Status)> done);
  // May be without effect after a crash.
  void Erase(EntryKind kind, const std::string& id);
  // Erases all steps of a model.
  void EraseSteps(const std::string& model);

  // The entries of a kind, in any order, for a front that starts: it waits for
  // the disk. One that cannot be read is left out, with a line in the log.
  [[nodiscard]] std::vector<LedgerEntry> ReadAll(EntryKind kind) const;

  // All steps in the order of their numbers.
  void ListSteps(std::function<void(std::vector<StepFile>)> done);
  // None for a file that cannot be read, or is gone.
  void ReadStep(const StepFile& file,
                std::function<void(std::optional<LedgerEntry>)> done);

  // False: nothing is kept.
  [[nodiscard]] bool keeps() const { return folder_.get() >= 0; }

 private:
  explicit Ledger(Post post) : post_(std::move(post)) {}

  [[nodiscard]] std::optional<LedgerEntry> Read(const std::string& name) const;
  [[nodiscard]] std::vector<std::string> Names(const std::string& prefix) const;
  void Remove(const std::string& name) const;

  const Post post_;
  UniqueFd folder_;
  std::string path_;
  size_t waiting_bytes_ = 0;
  // The last member: it ends before what its work uses.
  Worker disk_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_LEDGER_H_
