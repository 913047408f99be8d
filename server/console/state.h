// What the console shows to a caller, as JSON.
//
// {"now", "server": {...}, "caller": {...}, "tokens": {"train", "sampled"},
//  "queued": {KIND: number}, "load": {...}, "tenants": [...],
//  "num_adapters", "num_matching", "adapters": [...], "selected": {...},
//  "errors": [...]}
// A caller without admin's rights sees its own tenant: "load" and "tenants" are
// absent, "queued" has one number, and tokens are those of its adapters. While
// the engine starts, only "now", "server", "caller" and "errors" are present.
#ifndef WEFT_SERVER_CONSOLE_STATE_H_
#define WEFT_SERVER_CONSOLE_STATE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "server/caller.h"
#include "server/service_core.h"
#include "server/tinker/fields.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::console {

// Limits on the lists. With more adapters, those used last are listed.
inline constexpr size_t kMaxAdapters = 200;
inline constexpr size_t kMaxTenants = 100;
inline constexpr size_t kMaxErrors = 50;
inline constexpr size_t kMaxCheckpoints = 50;

struct StateQuery {
  // Lists the adapters with this text in their id or tenant, in any case.
  std::string search;
  // The adapter whose points are wanted; may be unknown.
  std::string selected;
};

// Takes some milliseconds if there are a thousand adapters. Threads: any.
[[nodiscard]] tinker::Json MakeState(const ServiceCore& core,
                                     const Caller& caller,
                                     const StateQuery& query);

// Returns the latest checkpoints as a list.
[[nodiscard]] tinker::Json CheckpointsJson(
    std::vector<CheckpointInfo> checkpoints);

}  // namespace weft::console

#endif  // WEFT_SERVER_CONSOLE_STATE_H_
