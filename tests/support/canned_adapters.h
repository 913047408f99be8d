// The adapters of the canned engine, with their steps and files.
#ifndef WEFT_TESTS_SUPPORT_CANNED_ADAPTERS_H_
#define WEFT_TESTS_SUPPORT_CANNED_ADAPTERS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/files/file_source.h"
#include "src/base/threads/worker.h"
#include "src/dispatch/dispatcher.h"

namespace weft {

// Threads: any thread may call the methods with a callback. They queue work,
// and the callback runs on the reply thread. The other methods run on the
// engine thread. Only the I/O thread uses the map of checkpoints.
class CannedAdapters {
 public:
  // The arguments outlive the last task that is posted to them.
  CannedAdapters(dispatch::Dispatcher* dispatcher, Worker* io, Worker* replies)
      : dispatcher_(*dispatcher), io_(*io), replies_(*replies) {}

  void Create(CreateAdapterRequest request, Callback<AdapterInfo> done);
  void Delete(const std::string& adapter_id, Callback<bool> done);
  // Loads a checkpoint into an adapter that does not exist yet.
  void LoadNew(LoadCheckpointRequest request, Callback<AdapterInfo> done);
  void Import(ImportAdapterRequest request, Callback<AdapterInfo> done);
  void Export(const ExportAdapterRequest& request, Callback<PeftFiles> done);
  void ReleaseSnapshot(const ReleaseSnapshotRequest& request,
                       Callback<bool> done);
  void ListCheckpoints(std::string adapter_id,
                       Callback<std::vector<CheckpointInfo>> done);
  void DeleteCheckpoint(std::string adapter_id, std::string name,
                        Callback<bool> done);
  void SetCheckpointTtl(SetCheckpointTtlRequest request,
                        Callback<CheckpointInfo> done);
  // The files of a canned checkpoint hold no tensors.
  void DownloadCheckpoint(std::string adapter_id, std::string name,
                          Callback<std::vector<FileSource>> done);
  void UploadCheckpoint(UploadCheckpointRequest request,
                        Callback<CheckpointInfo> done);

  // Runs a step other than training and completes it, at once or when its file
  // is done.
  void Run(const StepTask& step);
  void Run(const dispatch::Move& move);
  // Notes that the adapter's gradient has that many tokens more.
  void CountTrained(AdapterKey adapter, int64_t num_tokens) {
    adapters_.at(adapter).accumulated_tokens +=
        static_cast<uint64_t>(num_tokens);
  }
  // Returns the version from which the request samples. Errors: NOT_FOUND (no
  // such snapshot).
  absl::StatusOr<uint64_t> Version(AdapterKey adapter,
                                   const SampleRequest& request) const;

 private:
  struct Adapter {
    LoraConfig config;
    uint64_t version = 1;
    uint64_t optim_steps = 0;
    Optimizer optimizer = Optimizer::kAdamW;
    uint64_t accumulated_tokens = 0;
    std::map<std::string, uint64_t> snapshots;
    PeftFiles files;
    AdapterLocation location = AdapterLocation::kDevice;
    Durability durability = Durability::kMemory;
  };
  struct NewAdapter {
    CreateAdapterRequest request;
    Adapter adapter;
    uint64_t last_step = 0;
  };

  template <typename T>
  void Reply(const Callback<T>& done, absl::StatusOr<T> result) {
    replies_.Post([done, result = std::move(result)]() mutable {
      done(std::move(result));
    });
  }
  // Runs `body` on the engine thread. If the engine has ended, `done` gets an
  // error.
  template <typename T, typename Body>
  void Post(const Callback<T>& done, Body body) {
    dispatcher_.Post(
        [this, done, body = std::move(body)](const absl::Status& open) {
          if (!open.ok()) return Reply<T>(done, open);
          body();
        });
  }
  // Runs `body` with the key of the adapter. If there is none, `done` gets
  // NOT_FOUND.
  template <typename T, typename Body>
  void PostFor(const std::string& adapter_id, const Callback<T>& done,
               Body body) {
    Post(done, [this, adapter_id, done, body = std::move(body)] {
      const auto key = dispatcher_.adapters().KeyOf(adapter_id);
      if (!key) return Reply<T>(done, dispatch::NoSuchAdapter(adapter_id));
      body(*key);
    });
  }
  // Runs `task` on the I/O thread. A drain waits until the task has run.
  void PostIo(std::function<void()> task) {
    io_.Post([hold = dispatcher_.Hold(), task = std::move(task)] { task(); });
  }

  void MakeWhenRoom(NewAdapter made, Callback<AdapterInfo> done);
  absl::StatusOr<AdapterInfo> Make(const NewAdapter& made);
  dispatch::AdapterFacts Facts(AdapterKey key) const;
  void Save(const StepTask& step, const SaveCheckpointRequest& request);
  void Load(const StepTask& step, const LoadCheckpointRequest& request);

  // Runs on the I/O thread.
  absl::StatusOr<CheckpointInfo> Write(CheckpointInfo info, bool overwrite);
  absl::StatusOr<CheckpointInfo> Read(
      const LoadCheckpointRequest& request) const;

  dispatch::Dispatcher& dispatcher_;
  Worker& io_;
  Worker& replies_;
  std::map<AdapterKey, Adapter> adapters_;  // Used by the engine thread.
  // Keys: adapter and name. Used by the I/O thread.
  std::map<std::pair<std::string, std::string>, CheckpointInfo> checkpoints_;
  // The source adapters of copies.
  std::map<std::pair<std::string, std::string>, std::string> copied_from_;
};

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_CANNED_ADAPTERS_H_
