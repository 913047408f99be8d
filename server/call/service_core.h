// The objects that every service needs to answer a call.
#ifndef WEFT_SERVER_CALL_SERVICE_CORE_H_
#define WEFT_SERVER_CALL_SERVICE_CORE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "server/call/authenticator.h"
#include "server/call/call_errors.h"
#include "server/call/call_memory.h"
#include "server/call/health.h"
#include "server/call/load_history.h"
#include "server/call/read_turns.h"
#include "server/call/rpc_metrics.h"
#include "server/call/stalled_calls.h"
#include "server/call/tenant_quota.h"
#include "server/call/tokenizer_files.h"
#include "src/base/options/options.h"
#include "src/base/reason.h"
#include "src/base/threads/mutex.h"
#include "src/base/threads/worker.h"
#include "src/engine/engine.h"

namespace weft::server {

// Gives the engine to the handlers of calls. There is no engine while the
// daemon starts. While the daemon drains, new work gets no engine.
// Threads: any.
// Ownership: the caller of Set owns the engine. The engine outlives the server.
class EngineHolder {
 public:
  // Sets the engine. Call it once, when the engine can take work.
  void Set(engine::Engine* engine) { engine_.store(engine); }

  // Sets whether new work is refused.
  void SetDraining(bool draining) { draining_.store(draining); }
  bool draining() const { return draining_.load(); }
  // Notes that the process will end: the drain is the last one.
  void SetFinishing() { finishing_.store(true); }
  bool finishing() const { return finishing_.load(); }

  // Returns the engine for new work. Errors: UNAVAILABLE while the daemon
  // starts or drains.
  absl::StatusOr<engine::Engine*> Get() const {
    if (draining()) {
      return absl::UnavailableError(
          "the server is draining and takes no new work");
    }
    if (Peek() != nullptr) return Peek();
    return NotYet();
  }
  // Like Get, for work that goes on in a drain until the daemon ends.
  absl::StatusOr<engine::Engine*> GetInADrain() const {
    if (!finishing() && Peek() != nullptr) return Peek();
    return Get();
  }

  // Notes that the process at `owner` (HOST:PORT, may be empty) has the state,
  // and this one stands by for it.
  void SetStandby(const std::string& owner) {
    MutexLock lock(&mu_);
    owner_ = owner;
  }
  // Returns why there is no engine: the process starts, or another one has the
  // state, whose address the error has (MOVED).
  absl::Status NotYet() const {
    MutexLock lock(&mu_);
    return owner_ ? MovedTo(*owner_)
                  : absl::UnavailableError("the server is starting");
  }

  // Returns the engine, even during a drain; null while the daemon starts.
  engine::Engine* Peek() const { return engine_.load(); }

 private:
  std::atomic<engine::Engine*> engine_{nullptr};
  std::atomic<bool> draining_{false};
  std::atomic<bool> finishing_{false};
  mutable Mutex mu_;
  std::optional<std::string> owner_ ABSL_GUARDED_BY(mu_);
};

// All handlers of calls share this object, which outlives the gRPC server.
// `options`, `authenticator`, `tokenizer`, `begin_drain` and `end_drain` are
// set before the server starts. Any thread may use the other members.
struct ServiceCore {
  ServiceCore(ServerOptions server_options,
              prometheus::Registry* metric_registry)
      : options(std::move(server_options)),
        registry(metric_registry),
        metrics(metric_registry),
        quota(options.max_calls_per_tenant,
              options.max_tokens_per_second_per_tenant),
        memory(MakeCallMemory(options)),
        imports(std::make_shared<FairBudget>(
            options.auth_tokens_file.empty() ? 2 * options.max_import_bytes
                                             : options.max_import_bytes,
            "bytes of imports", "--max-import-bytes")) {}

  const ServerOptions options;
  prometheus::Registry* const registry;
  std::unique_ptr<Authenticator> authenticator;  // Null without
                                                 // --auth-tokens-file.
  TokenizerFiles tokenizer;
  RpcMetrics metrics;
  CallErrors errors;
  TenantQuota quota;
  // The memory that calls take: each charges its tenant (OwnerKey) before it
  // allocates, and holds the charge as long as the memory.
  const std::shared_ptr<FairBudget> memory;
  // The bytes of imports and uploads under way. A tenant may hold half of them;
  // a server without tokens has one holder, so its half is the whole limit.
  const std::shared_ptr<FairBudget> imports;
  StalledCalls stalled;
  ReadTurns reads;
  HealthBoard health;
  LoadHistory history;
  EngineHolder engine;
  // Counts the CallRecords that exist: calls that have not ended.
  std::atomic<int> open_calls{0};
  // Turns readiness to NOT_SERVING, refuses new work and drains the engine.
  std::function<void(Callback<bool>)> begin_drain;
  // Takes new work again. Errors: FAILED_PRECONDITION if the process ends.
  std::function<absl::Status()> end_drain = [] { return absl::OkStatus(); };
  // Reads the files that clients download, so that no thread of gRPC waits for
  // the disk. It ends before the other members.
  Worker files;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_SERVICE_CORE_H_
