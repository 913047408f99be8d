// Keeps the files of checkpoints, each whole or absent, on a disk
// (disk_checkpoints.h) or in an object store (object_checkpoints.h).
//
// Errors of all functions: those of durable_folder.h or of object_store.h;
// ABORTED if a later owner of the log has written the checkpoint;
// RESOURCE_EXHAUSTED with the reason CHECKPOINT_STORE_UNREACHABLE if the store
// does not answer.
// Threads: one at a time. The functions block on the disk or the store.
#ifndef WEFT_SRC_CHECKPOINT_CHECKPOINT_FILES_H_
#define WEFT_SRC_CHECKPOINT_CHECKPOINT_FILES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "src/base/files/durable_folder.h"

namespace weft::checkpoint {

// The reason of the error (src/base/reason.h) if the store does not answer.
inline constexpr char kStoreUnreachable[] = "CHECKPOINT_STORE_UNREACHABLE";

struct CheckpointName {
  std::string adapter_id;
  std::string name;
};

struct ListedCheckpoint {
  CheckpointName name;
  std::string version;  // Another one after each change.
};

// Returns whether an error means that the store does not answer. So it says
// nothing about a checkpoint.
bool IsUnreachable(const absl::Status& status);

class CheckpointFiles {
 public:
  virtual ~CheckpointFiles() = default;

  // Removes what interrupted writes have left. Call it before any write.
  virtual void RemoveStaleFiles() {}
  // Removes some of what interrupted writes of earlier processes have left, if
  // that cannot be done before the first write. Is cheap when nothing is left,
  // and short.
  virtual void Sweep() {}

  // Writes a checkpoint whose tensors have `bytes`. Errors: ALREADY_EXISTS
  // without `overwrite`; RESOURCE_EXHAUSTED with the reason
  // CHECKPOINT_DISK_FULL.
  virtual absl::Status Write(const CheckpointName& name,
                             const DurableFolder& folder, uint64_t bytes,
                             bool overwrite) = 0;

  // These do what ReadDurableFolder, OpenDurableFolder, ReadDurableFields,
  // ReplaceDurableFields and RemoveDurableFolder do. Open reads no file.
  virtual absl::StatusOr<DurableFolder> Read(
      const CheckpointName& name) const = 0;
  virtual absl::StatusOr<OpenedFolder> Open(
      const CheckpointName& name) const = 0;
  virtual absl::StatusOr<nlohmann::json> ReadFields(
      const CheckpointName& name) const = 0;
  virtual absl::Status ReplaceFields(const CheckpointName& name,
                                     const nlohmann::json& fields) = 0;
  virtual absl::Status Remove(const CheckpointName& name) = 0;

  // Removes the checkpoint if `still` accepts its fields as they are now.
  // Returns ABORTED otherwise: another process has changed it.
  virtual absl::Status RemoveIf(
      const CheckpointName& name,
      const std::function<bool(const nlohmann::json& fields)>& still);

  // Returns the fields of each, in order. May be faster than ReadFields.
  virtual std::vector<absl::StatusOr<nlohmann::json>> ReadFieldsOf(
      const std::vector<CheckpointName>& names) const;

  // Returns the checkpoints of the adapter; if `is_prefix`, those of all
  // adapters whose ids begin with `adapter_id`. Reads no file.
  virtual absl::StatusOr<std::vector<ListedCheckpoint>> List(
      const std::string& adapter_id, bool is_prefix) const = 0;
};

}  // namespace weft::checkpoint

#endif  // WEFT_SRC_CHECKPOINT_CHECKPOINT_FILES_H_
