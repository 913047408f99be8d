#include "src/log/verify.h"

#include <memory>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/log/image_file.h"
#include "src/log/log_reader.h"
#include "src/log/record.h"
#include "src/log/state_folder.h"

namespace weft::records {
namespace {

class Verifier {
 public:
  explicit Verifier(const journal::StateFolder* folder) : folder_(*folder) {}

  [[nodiscard]] absl::StatusOr<StateReport> Run() {
    uint64_t first = 1;
    WEFT_ASSIGN_OR_RETURN(const auto file, folder_.ReadSnapshot());
    if (file) {
      WEFT_ASSIGN_OR_RETURN(const Snapshot snapshot,
                            DecodeSnapshot(file->bytes));
      for (const AdapterRecord& adapter : snapshot.adapters) {
        WEFT_RETURN_IF_ERROR(Check(adapter));
      }
      first = file->next_sequence;
    }
    WEFT_ASSIGN_OR_RETURN(journal::LogReader log,
                          journal::LogReader::Open(folder_, first));
    for (;;) {
      WEFT_ASSIGN_OR_RETURN(const auto bytes, log.Next());
      if (!bytes) break;
      const absl::StatusOr<Record> record = DecodeRecord(bytes->bytes);
      absl::Status status = record.status();
      if (status.ok()) status = Check(*record);
      if (!status.ok()) {
        return absl::Status(status.code(),
                            absl::StrCat("record ", bytes->sequence,
                                         " of the log: ", status.message()));
      }
      ++report_.records;
    }
    report_.adapters = adapters_.size();
    report_.bytes += log.read_bytes();
    report_.torn_bytes = log.torn_bytes();
    return report_;
  }

 private:
  [[nodiscard]] absl::Status Check(const Record& record) {
    if (const auto* adapter = std::get_if<AdapterRecord>(&record)) {
      return Check(*adapter);
    }
    if (const auto* removed = std::get_if<RemovedRecord>(&record)) {
      adapters_.erase(removed->key);
    }
    const auto* loaded = std::get_if<LoadedRecord>(&record);
    if (loaded == nullptr) return absl::OkStatus();
    return CheckImage(loaded->file, 1);
  }

  [[nodiscard]] absl::Status Check(const AdapterRecord& adapter) {
    adapters_.insert(adapter.key);
    if (!adapter.image) return absl::OkStatus();
    return CheckImage(adapter.image->file, adapter.image->versions.size());
  }

  [[nodiscard]] absl::Status CheckImage(const std::string& name,
                                        size_t num_versions) {
    WEFT_ASSIGN_OR_RETURN(
        const uint64_t bytes,
        journal::CheckImage(folder_, name, kStateBlocks + num_versions));
    ++report_.images;
    report_.bytes += bytes;
    return absl::OkStatus();
  }

  const journal::StateFolder& folder_;
  std::set<AdapterKey> adapters_;
  StateReport report_;
};

}  // namespace

absl::StatusOr<StateReport> VerifyState(const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<journal::StateFolder> folder,
                        journal::StateFolder::OpenExisting(path));
  return Verifier(folder.get()).Run();
}

}  // namespace weft::records
