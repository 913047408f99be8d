// Reads and writes adapters as files: checkpoints on the server's disk, and
// PEFT folders for export.
//
// A checkpoint is the folder <checkpoint dir>/<adapter id>/<name>/ with
//   adapter_config.json, adapter_model.safetensors   what PEFT loads;
//   optimizer.safetensors                            gradient and moments;
//   trainer_state.json                               steps and shape;
//   MANIFEST.json                                    sizes and checksums.
// Threads: the I/O thread. The functions use no tensor of the engine.
#ifndef WEFT_SRC_ADAPTERS_ADAPTER_IO_H_
#define WEFT_SRC_ADAPTERS_ADAPTER_IO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/lora/adapter.h"
#include "src/request/adapter.h"

namespace weft::engine {

struct LoadedCheckpoint {
  CheckpointInfo info;
  lora::AdapterState state;
};

class AdapterIo {
 public:
  // `base_model` is the name that exported folders give to the base model.
  AdapterIo(std::string checkpoint_dir, std::string base_model,
            const lora::ModelShape& shape)
      : checkpoint_dir_(std::move(checkpoint_dir)),
        base_model_(std::move(base_model)),
        shape_(shape) {}

  // Removes what an interrupted write left behind.
  void RemoveStaleFiles() const;

  // If the checkpoint already exists with the same step and state, an earlier
  // process wrote it for the same call: Save returns it unchanged. Errors:
  // ALREADY_EXISTS without overwrite, RESOURCE_EXHAUSTED (disk full).
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Save(
      const SaveCheckpointRequest& request, const LoraConfig& config,
      const lora::AdapterState& state, uint64_t last_step) const;
  // With weights_only the result has only weights, and its step is 0. Errors:
  // NOT_FOUND, DATA_LOSS (damaged files), FAILED_PRECONDITION (the checkpoint's
  // model has another shape).
  [[nodiscard]] absl::StatusOr<LoadedCheckpoint> Load(
      const LoadCheckpointRequest& request) const;
  // Describes the checkpoint without reading its tensors. Errors: as for Load.
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Describe(
      const std::string& adapter_id, const std::string& name) const;
  // Returns the adapter's checkpoints, newest first. Skips a damaged folder and
  // logs a warning.
  [[nodiscard]] absl::StatusOr<std::vector<CheckpointInfo>> List(
      const std::string& adapter_id) const;
  [[nodiscard]] absl::Status Delete(const std::string& adapter_id,
                                    const std::string& name) const;

  [[nodiscard]] PeftFiles Export(const LoraConfig& config,
                                 const std::vector<float>& weights) const;

 private:
  // Returns the checkpoint of the request's name if it holds the same state.
  [[nodiscard]] std::optional<CheckpointInfo> SavedBefore(
      const SaveCheckpointRequest& request, const LoraConfig& config,
      const lora::AdapterState& state, uint64_t last_step) const;
  // Adds the names of some of the adapter's checkpoints to a NOT_FOUND.
  [[nodiscard]] absl::Status NameOthers(const absl::Status& status,
                                        const std::string& adapter_id) const;
  // Returns the names of all adapters that have a folder.
  [[nodiscard]] std::vector<std::string> AdapterNames() const;
  [[nodiscard]] std::string AdapterDir(const std::string& adapter_id) const;

  const std::string checkpoint_dir_;
  const std::string base_model_;
  const lora::ModelShape shape_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ADAPTERS_ADAPTER_IO_H_
