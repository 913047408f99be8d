// Reads and writes adapters as files: checkpoints on the server's disk, and
// PEFT folders for export.
//
// A checkpoint is the folder <checkpoint dir>/<adapter id>/<name>/ with
//   adapter_config.json, adapter_model.safetensors   what PEFT loads;
//   optimizer.safetensors   gradient and moments, not in kind sampler;
//   trainer_state.json      the manifest's fields, for people;
//   MANIFEST.json           sizes and checksums (src/files/durable_folder.h),
//                           and the fields of src/peft/checkpoint_fields.h.
// Threads: the I/O thread. The functions use no tensor of the engine.
#ifndef WEFT_SRC_ADAPTERS_ADAPTER_IO_H_
#define WEFT_SRC_ADAPTERS_ADAPTER_IO_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "src/lora/adapter.h"
#include "src/peft/checkpoint_fields.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::engine {

struct LoadedCheckpoint {
  CheckpointInfo info;
  lora::AdapterState state;
};

// An adapter at the time of a save.
struct AdapterCopy {
  std::string tenant;
  LoraConfig config;
  lora::AdapterState state;
  uint64_t last_step = 0;
};

class AdapterIo {
 public:
  // Exported folders give the base model's name. Writes leave `disk_reserve`
  // bytes of the disk free.
  AdapterIo(std::string checkpoint_dir, lora::BaseModel base,
            uint64_t disk_reserve = 0)
      : checkpoint_dir_(std::move(checkpoint_dir)),
        base_(std::move(base)),
        disk_reserve_(disk_reserve) {}

  // Removes what an interrupted write left behind.
  void RemoveStaleFiles() const;

  // Writes the checkpoint, and then deletes older ones as request.keep_newest
  // says. If the checkpoint already exists with the same step, state and
  // properties, an earlier process wrote it for the same call: Save returns it
  // unchanged. Errors: ALREADY_EXISTS without overwrite, RESOURCE_EXHAUSTED
  // (the disk is full, or the reserve would be used).
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Save(
      const SaveCheckpointRequest& request, const AdapterCopy& adapter);
  // With weights_only the result has only weights, and its step is 0. Errors:
  // NOT_FOUND (also if it has expired), DATA_LOSS (damaged files),
  // FAILED_PRECONDITION (the checkpoint belongs to another base model, or has
  // only weights).
  [[nodiscard]] absl::StatusOr<LoadedCheckpoint> Load(
      const LoadCheckpointRequest& request) const;
  // Describes the checkpoint that a load asks for, without reading its tensors.
  // Errors: as for Load.
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Describe(
      const LoadCheckpointRequest& request) const;
  // Returns the checkpoint's files, with its present fields. Errors: NOT_FOUND
  // (also if it has expired), DATA_LOSS.
  [[nodiscard]] absl::StatusOr<PeftFiles> Download(
      const std::string& adapter_id, const std::string& name) const;
  // Writes a checkpoint from the files of Download. Errors: INVALID_ARGUMENT
  // (files that are no checkpoint), FAILED_PRECONDITION (another base model),
  // ALREADY_EXISTS without overwrite, RESOURCE_EXHAUSTED as for Save.
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Upload(
      const UploadCheckpointRequest& request);
  // Returns the adapter's checkpoints, newest first; those of all adapters if
  // the id is empty. Skips those that have expired. Skips a damaged folder and
  // logs a warning.
  [[nodiscard]] absl::StatusOr<std::vector<CheckpointInfo>> List(
      const std::string& adapter_id) const;
  // Adds the names of some of the adapter's checkpoints to a NOT_FOUND, which
  // keeps its reason. Returns any other status as it is.
  [[nodiscard]] absl::Status NameOthers(const absl::Status& status,
                                        const std::string& adapter_id) const;
  [[nodiscard]] absl::Status Delete(const std::string& adapter_id,
                                    const std::string& name);
  // Deletes the checkpoints that have expired. It reads the folders only in the
  // first call and when one is due, so it may be called often.
  void DeleteExpired();
  // Returns the bytes of all checkpoints, without reading the folders. The
  // first call of DeleteExpired counts those of earlier processes.
  [[nodiscard]] uint64_t stored_bytes() const;

  [[nodiscard]] PeftFiles Export(const LoraConfig& config,
                                 const std::vector<float>& weights) const;

 private:
  // Writes the checkpoint that `info` describes, with the adapter's tensors.
  // Sets the bytes in `info`. Errors: ALREADY_EXISTS without overwrite.
  [[nodiscard]] absl::Status Write(const AdapterCopy& adapter, bool overwrite,
                                   CheckpointInfo* info);
  // Returns the checkpoint of the request's name if it holds the same.
  [[nodiscard]] std::optional<CheckpointInfo> SavedBefore(
      const SaveCheckpointRequest& request, const AdapterCopy& adapter) const;
  // Deletes the oldest checkpoints of the adapter that have the kind of `saved`
  // so that `count` remain, among them `saved`.
  void KeepNewest(const CheckpointInfo& saved, uint64_t count);
  // Returns all checkpoints as List does, with those that have expired.
  [[nodiscard]] std::vector<CheckpointInfo> ListAll(
      const std::string& adapter_id) const;
  // Reads the fields and checks that the checkpoint may be loaded.
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Check(
      const LoadCheckpointRequest& request, const nlohmann::json& fields) const;
  [[nodiscard]] bool IsExpired(const std::string& adapter_id,
                               const std::string& name) const;
  // Returns the names of all adapters that have a folder.
  [[nodiscard]] std::vector<std::string> AdapterNames() const;
  [[nodiscard]] std::string AdapterDir(const std::string& adapter_id) const;

  const std::string checkpoint_dir_;
  const lora::BaseModel base_;
  const uint64_t disk_reserve_;
  // No checkpoint expires before this time.
  absl::Time next_expiry_ = absl::InfinitePast();
  // Bytes of the checkpoints, by adapter and name.
  std::map<std::pair<std::string, std::string>, uint64_t> sizes_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ADAPTERS_ADAPTER_IO_H_
