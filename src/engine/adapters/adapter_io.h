// Reads and writes adapters as files: checkpoints (src/checkpoint), and PEFT
// folders for export.
//
// A checkpoint has the files
//   adapter_config.json, adapter_model.safetensors   what PEFT loads;
//   optimizer.safetensors   gradient and moments, not in kind sampler;
//   trainer_state.json      the manifest's fields as of the save, for people;
//   MANIFEST.json           sizes and checksums (folder_manifest.h),
//                           and the fields of src/lora/checkpoint_fields.h.
// Threads: one at a time. The functions use no tensor of the engine.
#ifndef WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_IO_H_
#define WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_IO_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "src/base/files/file_source.h"
#include "src/checkpoint/checkpoint_files.h"
#include "src/lora/adapter.h"
#include "src/lora/checkpoint_fields.h"
#include "src/lora/peft_format.h"
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
  // `base` is the server's base model. After a look for expired checkpoints
  // that failed, DeleteExpired looks again after `expiry_retry`.
  AdapterIo(std::unique_ptr<checkpoint::CheckpointFiles> checkpoints,
            lora::BaseModel base,
            absl::Duration expiry_retry = absl::Minutes(1))
      : checkpoints_(std::move(checkpoints)),
        base_(std::move(base)),
        expiry_retry_(expiry_retry) {}

  // Removes what interrupted writes have left. Call it before any write.
  void RemoveStaleFiles();

  // Writes the checkpoint, and then deletes older ones as request.keep_newest
  // says. If the write fails because the checkpoint exists or the disk is full,
  // reads the stored checkpoint of this name. If the stored checkpoint has the
  // step, state and properties of this save, an earlier call wrote it, and Save
  // returns it. Errors: ALREADY_EXISTS without overwrite, RESOURCE_EXHAUSTED
  // (the disk is full, or the store does not answer), and others of
  // checkpoint_files.h.
  absl::StatusOr<CheckpointInfo> Save(const SaveCheckpointRequest& request,
                                      const AdapterCopy& adapter);
  // Reads a checkpoint. With weights_only the result has only weights, and
  // last_step is 0. Errors: NOT_FOUND (also if it has expired), DATA_LOSS
  // (damaged files, or weights that are not finite), FAILED_PRECONDITION (the
  // checkpoint belongs to another base model, or has only weights and the
  // request needs the optimizer's state).
  absl::StatusOr<LoadedCheckpoint> Load(
      const LoadCheckpointRequest& request) const;
  // Describes the checkpoint that Load would read, without reading its tensors.
  // Errors: as for Load.
  absl::StatusOr<CheckpointInfo> Describe(
      const LoadCheckpointRequest& request) const;
  // Opens the checkpoint's files except the manifest. They check themselves
  // while they are read (CheckWhileRead). trainer_state.json has the manifest's
  // fields. Errors: NOT_FOUND (also if it has expired), DATA_LOSS.
  absl::StatusOr<std::vector<FileSource>> Download(
      const std::string& adapter_id, const std::string& name) const;
  // Writes a checkpoint from the files of Download. Errors: INVALID_ARGUMENT
  // (files that are no checkpoint), FAILED_PRECONDITION (another base model or
  // format version), and those of Save.
  absl::StatusOr<CheckpointInfo> Upload(const UploadCheckpointRequest& request);
  // Writes a copy of the checkpoint of `request.source_adapter_id`, with its
  // name, kind, metadata and state. If the write fails because an earlier call
  // has made the same copy, returns that one. Errors: those of Load and Save.
  absl::StatusOr<CheckpointInfo> Copy(const UploadCheckpointRequest& request);
  // Returns the adapter's checkpoints, newest first. If NamesAll(adapter_id),
  // returns those of all adapters whose names begin with it, and reads only
  // theirs. Skips checkpoints that have expired.
  // Skips a checkpoint with a damaged manifest and logs a warning. Errors:
  // those of checkpoint_files.h, as when the store does not answer.
  absl::StatusOr<std::vector<CheckpointInfo>> List(
      const std::string& adapter_id) const;
  // Adds the names of up to five of the adapter's checkpoints to the message of
  // a NOT_FOUND. Keeps the payloads. Returns any other status as it is.
  absl::Status NameOthers(const absl::Status& status,
                          const std::string& adapter_id) const;
  // Sets when the checkpoint expires, and returns it. Errors: NOT_FOUND (also
  // if it has expired), DATA_LOSS, RESOURCE_EXHAUSTED (the disk is full).
  absl::StatusOr<CheckpointInfo> SetTtl(const SetCheckpointTtlRequest& request);
  absl::Status Delete(const std::string& adapter_id, const std::string& name);
  // Deletes some of the checkpoints that have expired. Reads the listings only
  // if a checkpoint may have expired, so frequent calls are cheap, and a call
  // looks at few checkpoints, so it is short.
  void DeleteExpired();
  // Removes some of the files of saves that earlier processes did not end.
  void Sweep();
  // Returns the bytes of the tensor files of all checkpoints. Checkpoints of
  // earlier processes count once DeleteExpired has looked at them.
  uint64_t stored_bytes() const;
  // Returns a number that grows before each change that this process makes of
  // checkpoints ends. Threads: any.
  uint64_t changes() const { return changes_.load(); }

  // Reads a PEFT folder. Errors: those of ReadPeft.
  absl::StatusOr<lora::PeftAdapter> Import(const PeftFiles& files) const;
  // Writes a PEFT folder. Errors: those of CheckLoader.
  absl::StatusOr<PeftFiles> Export(const LoraConfig& config,
                                   const std::vector<float>& weights,
                                   Loader loader) const;

 private:
  struct Stored {
    std::string version;  // Of the files; empty if they have changed since.
    CheckpointInfo info;
  };
  // By adapter and name.
  using StoredOf = std::map<std::string, std::map<std::string, Stored>>;
  using Listing = std::vector<checkpoint::ListedCheckpoint>;

  // Writes the checkpoint that `info` describes, with the tensors of `state`.
  // Sets info->size_bytes. Errors: as for Save.
  absl::Status Write(const lora::AdapterState& state, bool overwrite,
                     CheckpointInfo* info);
  // Does what Write does, or sets *info to a checkpoint that an earlier call
  // has written, as Save says.
  absl::Status WriteOnce(const lora::AdapterState& state, bool overwrite,
                         CheckpointInfo* info);
  // Writes `state` as the checkpoint of `request` that `info` describes.
  absl::StatusOr<CheckpointInfo> WriteAs(const UploadCheckpointRequest& request,
                                         CheckpointInfo info,
                                         lora::AdapterState state);
  // Returns the stored checkpoint of this name if its step, state and
  // properties are those of `state` and `info`. Otherwise returns none.
  std::optional<CheckpointInfo> SavedBefore(const lora::AdapterState& state,
                                            const CheckpointInfo& info) const;
  // Returns the time for a new checkpoint. It is later than those of the
  // adapter's other checkpoints, even if the wall clock was set back, because
  // the times are the order of checkpoints.
  absl::StatusOr<absl::Time> NextCreation(const std::string& adapter_id) const;
  // Deletes the oldest checkpoints that have the adapter and the kind of
  // `saved`, until at most `count` remain. Never deletes `saved`.
  void KeepNewest(const CheckpointInfo& saved, uint64_t count);
  // Returns what List returns, and also the checkpoints that have expired.
  // Brings stored_ up to date, because others may change the files, too.
  absl::StatusOr<std::vector<CheckpointInfo>> ListAll(
      const std::string& adapter_id) const;
  // Reads the fields and checks that `request` may load the checkpoint.
  absl::StatusOr<CheckpointInfo> Check(const LoadCheckpointRequest& request,
                                       const nlohmann::json& fields) const;
  // Returns the names for which ListAll asks. Removes those that are gone from
  // stored_.
  absl::StatusOr<Listing> ListStored(const std::string& adapter_id) const;
  // Adds what is listed to stored_, or removes what is damaged. Reads only what
  // has changed.
  absl::Status ReadStored(const Listing& listed) const;
  // Returns null if the checkpoint is not in stored_.
  const Stored* FindStored(const checkpoint::CheckpointName& name) const;
  void Forget(const checkpoint::CheckpointName& name) const;
  // Deletes a checkpoint of stored_, or notes when it expires.
  void DeleteIfExpired(const checkpoint::CheckpointName& name, absl::Time now);

  const std::unique_ptr<checkpoint::CheckpointFiles> checkpoints_;
  const lora::BaseModel base_;
  const absl::Duration expiry_retry_;
  // DeleteExpired does not look again before this time.
  absl::Time next_expiry_ = absl::InfinitePast();
  Listing unseen_;  // What it has listed and not looked at yet.
  // So that a listing reads a manifest only once.
  mutable StoredOf stored_;
  std::atomic<uint64_t> changes_ = 0;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_IO_H_
