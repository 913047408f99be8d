// The objects that every service needs to answer a call.
#ifndef WEFT_SERVER_SERVICE_CORE_H_
#define WEFT_SERVER_SERVICE_CORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "server/authenticator.h"
#include "server/call_errors.h"
#include "server/call_memory.h"
#include "server/engine_holder.h"
#include "server/rpc_metrics.h"
#include "server/tenant_quota.h"
#include "src/base/options.h"

namespace weft {

// All handlers of calls share this object, which outlives the gRPC server.
// `options`, `authenticator` and `begin_drain` are set before the server
// starts. Any thread may use the other members.
struct ServiceCore {
  ServiceCore(ServerOptions server_options,
              prometheus::Registry* metric_registry)
      : options(std::move(server_options)),
        registry(metric_registry),
        metrics(metric_registry),
        quota(options.max_calls_per_tenant,
              options.max_tokens_per_second_per_tenant),
        memory(MakeCallMemory(options.max_message_bytes)) {}

  const ServerOptions options;
  prometheus::Registry* const registry;
  std::unique_ptr<Authenticator> authenticator;  // Null without
                                                 // --auth-tokens-file.
  RpcMetrics metrics;
  CallErrors errors;
  TenantQuota quota;
  // The memory that calls take: each charges its tenant (OwnerKey) before it
  // allocates, and holds the charge as long as the memory.
  const std::shared_ptr<FairBudget> memory;
  EngineHolder engine;
  // Counts the CallRecords that exist: calls that have not ended.
  std::atomic<int> open_calls{0};
  // Counts the bytes that all open imports and uploads hold.
  std::atomic<int64_t> import_bytes{0};
  // Turns readiness to NOT_SERVING and refuses new work.
  std::function<void()> begin_drain = [] {};
};

}  // namespace weft

#endif  // WEFT_SERVER_SERVICE_CORE_H_
