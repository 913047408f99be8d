#include "src/log/damage.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/base/status_macros.h"
#include "src/log/image_file.h"
#include "src/log/record.h"

namespace weft::records {
namespace {

using Hole = journal::LogReader::Hole;

// Returns the sequence number of the first record that the newest snapshot does
// not contain; 1 without a snapshot.
absl::StatusOr<uint64_t> FirstSequence(const journal::StateFolder& folder) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> snapshots,
                        folder.Snapshots());
  return snapshots.empty() ? 1 : snapshots.back();
}

class Finder {
 public:
  Finder(const journal::StateFolder* folder,
         const std::optional<std::set<std::string>>* suspects)
      : folder_(*folder), suspects_(*suspects) {}

  [[nodiscard]] absl::StatusOr<Damage> Run() {
    uint64_t first = 1;
    WEFT_ASSIGN_OR_RETURN(const auto file, folder_.ReadSnapshot());
    if (file) {
      WEFT_ASSIGN_OR_RETURN(const Snapshot snapshot,
                            DecodeSnapshot(file->bytes));
      first = file->next_sequence;
      damage_.next_key = snapshot.next_key;
      for (const StoredAdapter& adapter : snapshot.adapters) Add(adapter);
    }
    WEFT_RETURN_IF_ERROR(ReadLog(first));
    for (const auto& [key, adapter] : adapters_) {
      WEFT_RETURN_IF_ERROR(Judge(key, adapter));
    }
    return std::move(damage_);
  }

 private:
  struct Image {
    std::string file;
    size_t num_versions = 0;
  };
  struct Known {
    std::string name;
    std::vector<Image> images;
    std::set<size_t> undecided;  // Indexes in holes_ of the holes that may
                                 // contain records of the adapter.
    bool lost = false;           // A hole contains records of the adapter.
    bool removed = false;
  };

  [[nodiscard]] absl::Status ReadLog(uint64_t first) {
    WEFT_ASSIGN_OR_RETURN(journal::LogReader log,
                          journal::LogReader::Open(folder_, first));
    for (;;) {
      const auto record = log.Next();
      if (absl::IsDataLoss(record.status())) {
        WEFT_ASSIGN_OR_RETURN(Hole hole, log.SkipDamage());
        hole.first = std::max(hole.first, first);
        if (hole.first < hole.next) Add(hole, record.status());
        continue;
      }
      WEFT_RETURN_IF_ERROR(record.status());
      if (!*record) return absl::OkStatus();
      Trail trail;
      WEFT_ASSIGN_OR_RETURN(const Record decoded,
                            DecodeRecord((*record)->bytes, &trail));
      Follow(trail);
      Apply(decoded);
    }
  }

  void Add(const Hole& hole, const absl::Status& where) {
    for (auto& [key, adapter] : adapters_) {
      if (!adapter.removed) adapter.undecided.insert(holes_.size());
    }
    holes_.push_back(hole);
    damage_.places.push_back(absl::StrCat(where.message(), "; lost: records ",
                                          hole.first, " to ", hole.next - 1));
    // Each lost record may have created an adapter, which took a key.
    damage_.next_key += hole.next - hole.first;
  }

  Known& Add(const StoredAdapter& adapter) {
    Known& known = adapters_[adapter.key];
    known.name = adapter.adapter_id;
    if (adapter.image) {
      known.images.push_back({.file = adapter.image->file,
                              .num_versions = adapter.image->versions.size()});
    }
    NoteKey(adapter.key);
    return known;
  }

  void NoteKey(AdapterKey key) {
    damage_.next_key =
        std::max(damage_.next_key, static_cast<uint64_t>(key) + 1);
  }

  void Apply(const Record& record) {
    if (const auto* adapter = std::get_if<StoredAdapter>(&record)) {
      Add(*adapter);
    } else if (const auto* removed = std::get_if<RemovedRecord>(&record)) {
      adapters_[removed->key].removed = true;
    } else if (const auto* loaded = std::get_if<LoadedRecord>(&record);
               loaded != nullptr && !loaded->file.empty()) {
      adapters_[loaded->key].images.push_back(
          {.file = loaded->file, .num_versions = 1});
    }
  }

  void Follow(const Trail& trail) {
    if (holes_.empty()) return;
    for (const Mark& mark : trail.marks) Follow(mark);
    if (!trail.census) return;
    std::set<AdapterKey> alive;
    for (const Mark& mark : *trail.census) {
      Follow(mark);
      alive.insert(mark.key);
    }
    for (auto& [key, adapter] : adapters_) {
      if (!alive.contains(key)) adapter.removed = true;
    }
  }

  // Handles a mark of a readable record. The previous record that changed the
  // same adapter has the sequence number `mark.last`.
  void Follow(const Mark& mark) {
    NoteKey(mark.key);
    Known& adapter = adapters_[mark.key];
    if (adapter.name.empty()) adapter.name = mark.name;
    for (const Hole& hole : holes_) {
      if (hole.first <= mark.last && mark.last < hole.next) adapter.lost = true;
    }
    std::erase_if(adapter.undecided,
                  [&](size_t hole) { return mark.last < holes_[hole].first; });
  }

  [[nodiscard]] absl::Status Judge(AdapterKey key, const Known& adapter) {
    const bool lost = adapter.lost || !adapter.undecided.empty();
    if (adapter.removed) {
      if (lost) damage_.gone.insert(key);
      return absl::OkStatus();
    }
    std::string how = adapter.lost ? "records are lost"
                      : lost       ? "records may be lost"
                                   : "";
    for (const Image& image : adapter.images) {
      if (!how.empty()) break;
      const absl::Status status = Check(adapter, image);
      if (absl::IsResourceExhausted(status)) return status;
      if (!status.ok()) how = std::string(status.message());
    }
    if (how.empty()) return absl::OkStatus();
    DamagedAdapter& damaged = damage_.adapters[key];
    damaged.name = adapter.name.empty()
                       ? absl::StrCat("#", static_cast<uint64_t>(key))
                       : adapter.name;
    damaged.how = std::move(how);
    for (const Image& image : adapter.images) damaged.images.insert(image.file);
    return absl::OkStatus();
  }

  [[nodiscard]] absl::Status Check(const Known& adapter,
                                   const Image& image) const {
    const size_t blocks = kStateBlocks + image.num_versions;
    if (suspects_ && !suspects_->contains(adapter.name)) {
      return journal::CheckImageTable(folder_, image.file, blocks);
    }
    return journal::CheckImage(folder_, image.file, blocks).status();
  }

  const journal::StateFolder& folder_;
  const std::optional<std::set<std::string>>& suspects_;
  std::map<AdapterKey, Known> adapters_;
  std::vector<Hole> holes_;
  Damage damage_;
};

}  // namespace

absl::StatusOr<bool> LogIsDamaged(const journal::StateFolder& folder) {
  WEFT_ASSIGN_OR_RETURN(const uint64_t first, FirstSequence(folder));
  WEFT_ASSIGN_OR_RETURN(journal::LogReader log,
                        journal::LogReader::Open(folder, first));
  for (;;) {
    const auto record = log.Next();
    if (absl::IsDataLoss(record.status())) return true;
    WEFT_RETURN_IF_ERROR(record.status());
    if (!*record) return false;
  }
}

absl::StatusOr<Damage> FindDamage(
    const journal::StateFolder& folder,
    const std::optional<std::set<std::string>>& suspects) {
  return Finder(&folder, &suspects).Run();
}

absl::Status RefusalOf(const Damage& damage,
                       const std::set<std::string>& given_up) {
  std::vector<std::string> adapters;
  for (const auto& [key, adapter] : damage.adapters) {
    if (given_up.contains(adapter.name)) continue;
    adapters.push_back(
        absl::StrCat("adapter '", adapter.name, "': ", adapter.how));
  }
  if (adapters.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "the state folder is damaged: ", absl::StrJoin(damage.places, "; "),
      damage.places.empty() ? "" : "; ", absl::StrJoin(adapters, "; "),
      ". `weftctl state restore` brings a backup back. --recover-adapter NAME, "
      "for each of these adapters, starts without them and keeps their files "
      "in set-aside"));
}

absl::Status ImageRefusal(const std::string& adapter_id,
                          const absl::Status& reason) {
  if (absl::IsResourceExhausted(reason)) return reason;
  Damage damage;
  damage.adapters[AdapterKey::kBaseModel] = {
      .name = adapter_id, .how = std::string(reason.message()), .images = {}};
  return RefusalOf(damage, {});
}

}  // namespace weft::records
