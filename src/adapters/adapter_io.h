// Adapters as files: checkpoints on the server's disk, PEFT folders for export.
//
// A checkpoint is <checkpoint dir>/<adapter id>/<name>/ with
//   adapter_config.json, adapter_model.safetensors   what PEFT loads;
//   optimizer.safetensors                            gradient and moments;
//   trainer_state.json                               steps and shape;
//   MANIFEST.json                                    sizes and sums of all.
// Threads: the I/O thread. It uses no tensor of the engine.
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
  // Exported folders name `base_model`.
  AdapterIo(std::string checkpoint_dir, std::string base_model,
            const lora::ModelShape& shape)
      : checkpoint_dir_(std::move(checkpoint_dir)),
        base_model_(std::move(base_model)),
        shape_(shape) {}

  // Removes what an interrupted write left behind.
  void RemoveStaleFiles() const;

  // If a checkpoint of this name has this very state of this step, an earlier
  // process wrote it for the same call: returns that checkpoint.
  // Errors: ALREADY_EXISTS without overwrite, RESOURCE_EXHAUSTED (disk full).
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Save(
      const SaveCheckpointRequest& request, const LoraConfig& config,
      const lora::AdapterState& state, uint64_t last_step) const;
  // With weights_only it returns the weights alone, and step 0. Errors:
  // NOT_FOUND, DATA_LOSS (damaged files), FAILED_PRECONDITION (the model of the
  // checkpoint has another shape).
  [[nodiscard]] absl::StatusOr<LoadedCheckpoint> Load(
      const LoadCheckpointRequest& request) const;
  // Describes the checkpoint without reading its tensors. Errors: those of
  // Load.
  [[nodiscard]] absl::StatusOr<CheckpointInfo> Describe(
      const std::string& adapter_id, const std::string& name) const;
  // Newest first. Leaves out damaged folders, with a line in the log.
  [[nodiscard]] absl::StatusOr<std::vector<CheckpointInfo>> List(
      const std::string& adapter_id) const;
  [[nodiscard]] absl::Status Delete(const std::string& adapter_id,
                                    const std::string& name) const;

  [[nodiscard]] PeftFiles Export(const LoraConfig& config,
                                 const std::vector<float>& weights) const;

 private:
  // Returns the checkpoint of the request's name if it has this state.
  [[nodiscard]] std::optional<CheckpointInfo> SavedBefore(
      const SaveCheckpointRequest& request, const LoraConfig& config,
      const lora::AdapterState& state, uint64_t last_step) const;
  // Returns the names of all adapters that have a folder.
  [[nodiscard]] std::vector<std::string> AdapterNames() const;
  [[nodiscard]] std::string AdapterDir(const std::string& adapter_id) const;

  const std::string checkpoint_dir_;
  const std::string base_model_;
  const lora::ModelShape shape_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ADAPTERS_ADAPTER_IO_H_
