// Keeps on disk what the front needs again after a restart: sessions, models,
// samplers, extras of checkpoints, adapters to delete, and the requests of
// steps.
//
// Each entry is a file in the folder STATE_DIR/tinker, and is written whole or
// not at all. Without --state-dir the ledger keeps nothing. The ledger has one
// thread, which writes and erases in the order of the calls. Callbacks run on
// the front's thread.
// Threads: the front's thread; until it runs, the thread that starts it.
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
#include "src/base/file_io.h"
#include "src/base/worker.h"

namespace weft::tinker {

enum class EntryKind : uint8_t {
  kSession,
  kModel,
  kSampler,
  kCheckpoint,
  // An adapter that is to be deleted (reaper.h).
  kOrphan,
  // The request of a step. The entry's id is MODEL:SEQ.
  kStep,
};

struct LedgerEntry {
  std::string id;
  Json fields;
  std::string bytes;  // The body of a step's request; else empty.
};

// The file of a step's request. The file's name contains `seq`, so that
// ListSteps need not read the files.
struct StepFile {
  std::string name;
  int64_t seq = 0;
};

class Ledger {
 public:
  // Runs a function on the front's thread.
  using Post = std::function<void(std::function<void()>)>;

  // Makes the folder STATE_DIR/tinker. If `state_dir` is empty, the ledger
  // keeps nothing. Errors: those of src/base/file_io.h.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Ledger>> Open(
      const std::string& state_dir, Post post);

  // Writes the entry, and replaces an entry that has the same kind and id.
  // `done` gets the outcome after the write. If too many bytes wait to be
  // written, `done` gets RESOURCE_EXHAUSTED (QUEUE_FULL) before Put returns. If
  // the ledger keeps nothing, `done` gets OK before Put returns.
  void Put(EntryKind kind, LedgerEntry entry,
           std::function<void(absl::Status)> done);
  // Has the ledger's thread erase an entry. If the process crashes first, the
  // entry stays.
  void Erase(EntryKind kind, const std::string& id);
  // Has the ledger's thread erase the requests of all steps of a model.
  void EraseSteps(const std::string& model);

  // Returns the entries of a kind in any order. Waits for the disk, so call it
  // only before the front's thread starts. Logs an entry that cannot be read,
  // and leaves it out.
  [[nodiscard]] std::vector<LedgerEntry> ReadAll(EntryKind kind) const;

  // Gives `done` the files of the steps of all models, in the order of their
  // sequence numbers.
  void ListSteps(std::function<void(std::vector<StepFile>)> done);
  // Reads a step's request. `done` gets nullopt if the file is gone or cannot
  // be read.
  void ReadStep(const StepFile& file,
                std::function<void(std::optional<LedgerEntry>)> done);

  // Returns false if there is no --state-dir, so that the ledger keeps nothing.
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
  // The last member, so that it is destroyed first. The Worker's destructor
  // runs the remaining tasks, which use the other members.
  Worker disk_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_LEDGER_H_
