// Requests that list, delete, download or upload checkpoints. They read and
// write files only, and change no adapter of the engine.
#include <utility>

#include "src/engine/adapter_manager.h"

namespace weft::engine {

void AdapterManager::ListCheckpoints(
    std::string adapter_id, Callback<std::vector<CheckpointInfo>> done) {
  context_.PostIo(
      [this, adapter_id = std::move(adapter_id), done = std::move(done)] {
        Reply(done, context_.files.List(adapter_id));
      });
}

void AdapterManager::DeleteCheckpoint(std::string adapter_id, std::string name,
                                      Callback<bool> done) {
  context_.PostIo([this, adapter_id = std::move(adapter_id),
                   name = std::move(name), done = std::move(done)] {
    const absl::Status status = context_.files.Delete(adapter_id, name);
    Reply(done, status.ok() ? absl::StatusOr<bool>(true) : status);
  });
}

void AdapterManager::DownloadCheckpoint(
    std::string adapter_id, std::string name,
    Callback<std::vector<FileSource>> done) {
  context_.PostIo([this, adapter_id = std::move(adapter_id),
                   name = std::move(name), done = std::move(done)] {
    Reply(done, context_.files.Download(adapter_id, name));
  });
}

void AdapterManager::UploadCheckpoint(UploadCheckpointRequest request,
                                      Callback<CheckpointInfo> done) {
  context_.PostIo([this, request = std::move(request), done = std::move(done)] {
    Reply(done, context_.files.Upload(request));
  });
}

}  // namespace weft::engine
