// The objects that the parts of the engine share.
#ifndef WEFT_SRC_ENGINE_ENGINE_CONTEXT_H_
#define WEFT_SRC_ENGINE_ENGINE_CONTEXT_H_

#include <functional>
#include <type_traits>
#include <utility>

#include "src/base/options/options.h"
#include "src/base/threads/worker.h"
#include "src/base/tokens.h"
#include "src/directory/directory.h"
#include "src/dispatch/dispatcher.h"
#include "src/engine/device/compute_device.h"
#include "src/engine/device/compute_guard.h"
#include "src/engine/device/engine_probe.h"
#include "src/engine/records/sample_records.h"
#include "src/log/recorder.h"
#include "src/log/state.h"

namespace weft::engine {

class AdapterIo;
class AdapterTable;

// Holds references to members of the engine. The engine's parts keep this
// context, and the members outlive the parts.
struct EngineContext {
  const EngineOptions& options;
  dispatch::Dispatcher& dispatcher;
  ComputeDevice& device;
  ComputeGuard& guard;
  AdapterTable& adapters;
  AdapterIo& files;  // Used by the I/O thread.
  EngineProbe& probe;
  log::Recorder& recorder;
  SampleRecords& sample_records;
  log::State* state;                // Null without --state-dir and --state.
  directory::Directory* directory;  // Null without --state.
  // Must be called before an adapter changes or is removed. If a running
  // snapshot still needs the adapter's old state, the call copies the old state
  // (snapshotter.h).
  std::function<void(AdapterKey)> before_change;
  // Runs the task on the engine thread when the store of --state answers, after
  // a pause. For what failed because the store did not (IsStoreAway).
  // Threads: engine thread.
  std::function<void(dispatch::EngineTask)> when_store_answers;
  Worker& io;       // Reads and writes files.
  Worker& replies;  // Runs the callbacks of clients.

  // Runs `task` on the I/O thread, in the turn of the adapter's tenant, or in
  // the server's own for "". A drain of the server waits until
  // `task` has run. Threads: any.
  void PostIo(const std::string& adapter_id, std::function<void()> task) const {
    io.Post([hold = dispatcher.Hold(), task = std::move(task)] { task(); },
            OwnerOf(adapter_id));
  }
  // Runs `task`, which calls a client's callback, on the reply thread when all
  // earlier records are on disk.
  void PostReply(std::function<void()> task) const {
    recorder.WhenDurable([this, task = std::move(task)]() mutable {
      replies.Post(std::move(task));
    });
  }
  // Gives the result to a client's callback, as PostReply says.
  template <typename T>
  void Reply(const Callback<T>& done,
             std::type_identity_t<absl::StatusOr<T>> result) const {
    PostReply([done, result = std::move(result)]() mutable {
      done(std::move(result));
    });
  }
  // Updates what clients see of the adapter. Threads: engine thread.
  void Publish(AdapterKey adapter) const;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ENGINE_CONTEXT_H_
