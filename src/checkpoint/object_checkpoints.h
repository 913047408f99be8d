// Checkpoints in an object store.
//
//   checkpoints/<adapter id>/<name>              the manifest
//   checkpoint-files/<adapter id>/<name>/<place>/<file>
//
// A write puts the files into a place of their own, then the manifest, which
// names the place, and then removes the files of the manifest before it. So a
// crash leaves at most files that no manifest names, and Sweep of a later owner
// removes them. All logs of the state share the checkpoints. A manifest has its
// writer's log and epoch, and no earlier owner of that log replaces it.
#ifndef WEFT_SRC_CHECKPOINT_OBJECT_CHECKPOINTS_H_
#define WEFT_SRC_CHECKPOINT_OBJECT_CHECKPOINTS_H_

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/files/folder_manifest.h"
#include "src/checkpoint/checkpoint_files.h"
#include "src/store/object_store.h"

namespace weft::checkpoint {

class ObjectCheckpoints : public CheckpointFiles {
 public:
  // `log` and `epoch` are those of the log's owner, and no other object has
  // both, so the names of places are this object's own. `check_owner` asks the
  // store whether the owner still has the log; it is called before a checkpoint
  // changes.
  // `store` outlives the object and the files that Open returns. Sweep begins
  // after `sweep_after`, because until then an earlier owner that was slow may
  // write a manifest. One that was frozen for longer would name files that are
  // gone.
  ObjectCheckpoints(store::ObjectStore* store, uint64_t log, uint64_t epoch,
                    std::function<absl::Status()> check_owner,
                    absl::Duration sweep_after = absl::Minutes(10))
      : store_(*store),
        log_(log),
        epoch_(epoch),
        check_owner_(std::move(check_owner)),
        sweep_after_(sweep_after) {}

  void Sweep() override;
  absl::Status Write(const CheckpointName& name, const DurableFolder& folder,
                     uint64_t bytes, bool overwrite) override;
  absl::StatusOr<DurableFolder> Read(const CheckpointName& name) const override;
  absl::StatusOr<OpenedFolder> Open(const CheckpointName& name) const override;
  absl::StatusOr<nlohmann::json> ReadFields(
      const CheckpointName& name) const override;
  absl::Status ReplaceFields(const CheckpointName& name,
                             const nlohmann::json& fields) override;
  absl::Status Remove(const CheckpointName& name) override;
  absl::Status RemoveIf(
      const CheckpointName& name,
      const std::function<bool(const nlohmann::json&)>& still) override;
  std::vector<absl::StatusOr<nlohmann::json>> ReadFieldsOf(
      const std::vector<CheckpointName>& names) const override;
  absl::StatusOr<std::vector<ListedCheckpoint>> List(
      const std::string& adapter_id, bool is_prefix) const override;

 private:
  struct Stored {
    FolderManifest manifest;
    std::string etag;  // Empty: there is no such checkpoint.
  };
  struct Place {
    CheckpointName name;
    FolderManifest manifest;  // Only the place, and the names of the files.
  };
  using Places = std::vector<Place>;

  // Writes the files and `manifest`, which describes them.
  absl::Status WriteObjects(const CheckpointName& name,
                            const DurableFolder& folder,
                            const FolderManifest& manifest, bool overwrite);
  // Errors: NOT_FOUND, DATA_LOSS.
  absl::StatusOr<Stored> ReadManifest(const CheckpointName& name) const;
  // Writes a manifest in place of `before`. Errors: ALREADY_EXISTS if there is
  // one, and should not be; ABORTED if another process has changed it.
  absl::Status WriteManifest(const CheckpointName& name,
                             const FolderManifest& manifest,
                             const Stored& before);
  absl::StatusOr<DurableFolder> ReadFiles(const CheckpointName& name,
                                          const FolderManifest& manifest) const;
  // Returns a file that `manifest` describes. Reads nothing.
  FileSource FileOf(const CheckpointName& name, const FolderManifest& manifest,
                    const FolderManifest::File& file) const;
  // Returns whether a write of this object, which the store has not answered,
  // has made what was found.
  bool IsUnsure(const CheckpointName& name,
                const absl::StatusOr<Stored>& found) const;
  // Returns whether an earlier owner of the log has made the place.
  bool IsEarlier(const std::string& place) const;
  // Returns the earlier owners' places that perhaps no manifest names.
  // Threads: any.
  absl::StatusOr<Places> FindSuspects() const;
  void PutOffSweep(const absl::Status& error);
  // Removes the place's files if no manifest names it.
  absl::Status SweepPlace(const Place& place);
  // What stays is only room: no manifest names it.
  void RemoveFiles(const CheckpointName& name, const FolderManifest& manifest);

  // Returns how the names of the log's places begin, before the epoch.
  std::string PlacePrefix() const;

  store::ObjectStore& store_;
  const uint64_t log_;
  const uint64_t epoch_;
  const std::function<absl::Status()> check_owner_;
  const absl::Duration sweep_after_;
  // Writes of this object that the store has not answered: their manifests may
  // be there, or come. By the key of the manifest.
  std::map<std::string, std::vector<FolderManifest>> unsure_;
  uint64_t num_places_ = 0;
  absl::Time sweep_at_ =
      SteadyNow() + sweep_after_;  // Sweep does nothing before.
  Places suspects_;                // What Sweep has found and not checked yet.
  std::future<absl::StatusOr<Places>> finding_;  // Ends before the others.
};

}  // namespace weft::checkpoint

#endif  // WEFT_SRC_CHECKPOINT_OBJECT_CHECKPOINTS_H_
