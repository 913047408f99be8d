// The memory that calls may take, and the bounds of a single request.
#ifndef WEFT_SERVER_CALL_CALL_MEMORY_H_
#define WEFT_SERVER_CALL_CALL_MEMORY_H_

#include <memory>

#include "server/http/fair_budget.h"
#include "src/base/options/options.h"

namespace weft::server {

// Makes the account of the memory that all calls of gRPC and HTTP take, and the
// requests of steps and samples: --request-memory. If that is 0, an eighth of
// what the process may use when it starts (its control groups, else the
// machine's memory), but at least room for two messages of the largest size, so
// that two tenants can each have one.
std::shared_ptr<FairBudget> MakeCallMemory(const ServerOptions& options);

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_CALL_MEMORY_H_
