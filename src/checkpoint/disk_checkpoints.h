// Checkpoints on a disk: <folder>/<adapter id>/<name>/ (durable_folder.h).
#ifndef WEFT_SRC_CHECKPOINT_DISK_CHECKPOINTS_H_
#define WEFT_SRC_CHECKPOINT_DISK_CHECKPOINTS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "src/checkpoint/checkpoint_files.h"

namespace weft::checkpoint {

class DiskCheckpoints : public CheckpointFiles {
 public:
  // Write fails if the tensors would leave fewer than `disk_reserve` bytes of
  // the disk free.
  explicit DiskCheckpoints(std::string folder, uint64_t disk_reserve = 0)
      : folder_(std::move(folder)), disk_reserve_(disk_reserve) {}

  void RemoveStaleFiles() override;
  absl::Status Write(const CheckpointName& name, const DurableFolder& folder,
                     uint64_t bytes, bool overwrite) override;
  absl::StatusOr<DurableFolder> Read(const CheckpointName& name) const override;
  absl::StatusOr<OpenedFolder> Open(const CheckpointName& name) const override;
  absl::StatusOr<nlohmann::json> ReadFields(
      const CheckpointName& name) const override;
  absl::Status ReplaceFields(const CheckpointName& name,
                             const nlohmann::json& fields) override;
  absl::Status Remove(const CheckpointName& name) override;
  absl::StatusOr<std::vector<ListedCheckpoint>> List(
      const std::string& adapter_id, bool is_prefix) const override;

 private:
  std::string AdapterDir(const std::string& adapter_id) const;
  // Returns the names of all adapters that have a folder and begin with
  // `prefix`. A link is no adapter's folder.
  std::vector<std::string> AdapterNames(const std::string& prefix) const;
  // Removes the adapter's folder if it has no checkpoint. Write makes it again.
  void RemoveIfEmpty(const std::string& adapter_id) const;

  const std::string folder_;
  const uint64_t disk_reserve_;
};

}  // namespace weft::checkpoint

#endif  // WEFT_SRC_CHECKPOINT_DISK_CHECKPOINTS_H_
