#include "src/log/copy/copy_state.h"

#include <map>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/log/bucket/state_bucket.h"
#include "src/log/folder/backup.h"
#include "src/log/folder/state_folder.h"
#include "src/log/log_summary.h"
#include "src/log/record.h"
#include "src/log/steady_read.h"
#include "src/store/open_store.h"

namespace weft::log {
namespace {

constexpr size_t kGroupBytes = 16 << 20;

// Returns the image that the record names; empty if it names none. What becomes
// of an adapter that arrives decides whether its image is there (OpenMoves).
std::string ImageOf(const Record& record) {
  if (const auto* loaded = std::get_if<LoadedRecord>(&record)) {
    return loaded->file;
  }
  const auto* adapter = std::get_if<StoredAdapter>(&record);
  return adapter != nullptr && adapter->image ? adapter->image->file : "";
}

// The moves that have begun and not ended.
class OpenMoves {
 public:
  // Returns the images of a unit that arrives with this record.
  std::vector<std::string> Add(const Record& record) {
    if (const auto* arriving = std::get_if<ArrivingRecord>(&record)) {
      std::vector<std::string>& images = arriving_[arriving->unit];
      for (const StoredAdapter& adapter : arriving->adapters) {
        images.push_back(ImageOf(adapter));
      }
    } else if (const auto* move = std::get_if<MoveRecord>(&record)) {
      leaving_.erase(move->unit);
      if (move->stage == MoveStage::kLeaving) leaving_.insert(move->unit);
      const auto images = arriving_.extract(move->unit);
      if (move->stage == MoveStage::kOwn && images) return images.mapped();
    }
    return {};
  }
  // Returns the records that leave the units where they are.
  std::vector<std::string> Ends() const {
    std::vector<std::string> ends;
    const auto end = [&ends](const std::string& unit, MoveStage stage) {
      ends.push_back(Encode(Record(MoveRecord{.unit = unit, .stage = stage})));
    };
    for (const std::string& unit : leaving_) end(unit, MoveStage::kStayed);
    for (const auto& [unit, images] : arriving_) {
      end(unit, MoveStage::kDropped);
    }
    return ends;
  }

 private:
  std::set<std::string> leaving_;
  std::map<std::string, std::vector<std::string>> arriving_;
};

class Copy {
 public:
  Copy(const State* from, State* to) : from_(*from), to_(*to) {}

  absl::StatusOr<CopyReport> Run() {
    int tries = 0;
    WEFT_RETURN_IF_ERROR(
        ReadSteadily(from_, [&](const std::optional<SnapshotFile>& snapshot) {
          ++tries;
          return CopyFrom(snapshot);
        }));
    // The tries before the last one have left older records and images.
    if (tries > 1) WEFT_RETURN_IF_ERROR(to_.Cut(first_sequence_, images_));
    report_.images = images_.size();
    return report_;
  }

 private:
  // Copies the snapshot, the log after it, and their images.
  absl::Status CopyFrom(const std::optional<SnapshotFile>& file) {
    WEFT_ASSIGN_OR_RETURN(const Snapshot snapshot, ToSnapshot(file));
    report_ = {};
    images_.clear();
    WEFT_RETURN_IF_ERROR(Begin(snapshot.first_sequence));
    if (file) {
      report_.bytes += file->bytes.size();
      WEFT_RETURN_IF_ERROR(to_.WriteSnapshot(*file));
    }
    for (const StoredAdapter& adapter : snapshot.adapters) {
      WEFT_RETURN_IF_ERROR(CopyImage(ImageOf(adapter)));
    }
    return CopyLog();
  }

  absl::Status Begin(uint64_t first_sequence) {
    first_sequence_ = first_sequence;
    if (log_ != nullptr) return log_->BeginSegment(first_sequence);
    WEFT_ASSIGN_OR_RETURN(log_, to_.ContinueLog(first_sequence));
    return absl::OkStatus();
  }

  // In a copy no other log has a part in a move, and no entry says whose the
  // unit is. So moves that are open end there.
  absl::Status CopyLog() {
    WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<LogReader> reader,
                          from_.OpenLog(first_sequence_));
    OpenMoves moves;
    next_ = first_sequence_;
    std::vector<std::string> group;
    size_t bytes = 0;
    for (;;) {
      WEFT_ASSIGN_OR_RETURN(std::optional<LogReader::Record> record,
                            reader->Next());
      if (!record) break;
      WEFT_ASSIGN_OR_RETURN(const Record decoded, DecodeRecord(record->bytes));
      WEFT_RETURN_IF_ERROR(CopyImage(ImageOf(decoded)));
      for (const std::string& image : moves.Add(decoded)) {
        WEFT_RETURN_IF_ERROR(CopyImage(image));
      }
      bytes += record->bytes.size();
      group.push_back(std::move(record->bytes));
      if (bytes < kGroupBytes) continue;
      WEFT_RETURN_IF_ERROR(WriteGroup(std::exchange(group, {})));
      bytes = 0;
    }
    for (std::string& end : moves.Ends()) group.push_back(std::move(end));
    return WriteGroup(group);
  }

  absl::Status WriteGroup(const std::vector<std::string>& group) {
    if (group.empty()) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(log_->WriteGroup(next_, group).status());
    next_ += group.size();
    report_.records += group.size();
    for (const std::string& record : group) report_.bytes += record.size();
    return absl::OkStatus();
  }

  absl::Status CopyImage(const std::string& name) {
    if (name.empty() || !images_.insert(name).second) return absl::OkStatus();
    // An earlier try may have copied it. An image never changes.
    auto copied = copied_.find(name);
    if (copied == copied_.end()) {
      WEFT_ASSIGN_OR_RETURN(const std::string bytes, ReadImage(name));
      WEFT_RETURN_IF_ERROR(to_.CreateImage(name, {bytes}));
      copied = copied_.emplace(name, bytes.size()).first;
    }
    report_.bytes += copied->second;
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> ReadImage(const std::string& name) const {
    const auto damaged = [&name](const char* how) {
      return absl::DataLossError(absl::StrCat("image \"", name, "\" ", how));
    };
    const absl::StatusOr<std::unique_ptr<ImageReader>> image =
        from_.OpenImage(name);
    if (absl::IsNotFound(image.status())) return damaged("is missing");
    WEFT_RETURN_IF_ERROR(image.status());
    WEFT_ASSIGN_OR_RETURN(const uint64_t size, (*image)->Size());
    std::string bytes(size, '\0');
    WEFT_ASSIGN_OR_RETURN(const size_t read, (*image)->Read(0, bytes));
    return read < size ? damaged("became shorter")
                       : absl::StatusOr<std::string>(std::move(bytes));
  }

  const State& from_;
  State& to_;
  std::unique_ptr<LogSink> log_;
  uint64_t first_sequence_ = 1;
  uint64_t next_ = 1;                       // Of the records to write.
  std::set<std::string> images_;            // Those that the copy names.
  std::map<std::string, uint64_t> copied_;  // Those of all tries: their sizes.
  CopyReport report_;
};

// Names the one process of a copy.
Instance SelfOfCopy() {
  std::random_device device;
  return {.name = "weftctl",
          .process = absl::StrFormat("%08x%08x", device(), device())};
}

}  // namespace

absl::StatusOr<CopyReport> CopyToFolder(const State& from,
                                        const std::string& to) {
  CopyReport report;
  const auto fill = [&](const std::string& draft) -> absl::Status {
    WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<StateFolder> folder,
                          StateFolder::Open(draft, from.model()));
    WEFT_ASSIGN_OR_RETURN(report, Copy(&from, folder.get()).Run());
    return absl::OkStatus();
  };
  WEFT_RETURN_IF_ERROR(MakeWholeFolder(to, fill));
  return report;
}

absl::StatusOr<CopyReport> CopyToStore(const State& from,
                                       std::unique_ptr<store::ObjectStore> to) {
  WEFT_RETURN_IF_ERROR(store::CheckConditions(to.get()));
  WEFT_ASSIGN_OR_RETURN(
      const std::unique_ptr<StateBucket> bucket,
      StateBucket::Begin(std::move(to), from.model(), SelfOfCopy()));
  const auto copy = [&]() -> absl::StatusOr<CopyReport> {
    WEFT_ASSIGN_OR_RETURN(const CopyReport report,
                          Copy(&from, bucket.get()).Run());
    WEFT_RETURN_IF_ERROR(bucket->Finish());
    return report;
  };
  const absl::StatusOr<CopyReport> report = copy();
  if (report.ok()) return report;
  return absl::Status(
      report.status().code(),
      absl::StrCat(report.status().message(), ". ",
                   bucket->objects()->NameOf(""),
                   " has a part of the copy: remove it, or name another "
                   "prefix"));
}

}  // namespace weft::log
