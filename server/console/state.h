// Makes the JSON that the console shows to a caller:
//
// {"now", "server": {...}, "caller": {...}, "tokens": {"train", "sampled"},
//  "queued": {KIND: number}, "load": {...}, "tenants": [...], "history": [...],
//  "num_adapters", "num_restoring", "num_matching", "adapters": [...],
//  "selected": {...}, "compared": [...], "errors": [...]}
// If Caller::sees_all is false, the JSON covers only the caller's tenant:
// "load", "tenants" and "history" are absent, and "queued" has the one number
// "all". While the engine starts, only "now", "server", "caller" and "errors"
// are present. "selected" is present only if StateQuery::selected names an
// adapter.
//
// A curve is {"name", "at": [OptimSteps], "values": [...]}. The adapter's loss
// is the curve "loss" that its client reports (ReportMetrics), or else that of
// its ForwardBackwards, unless their losses are surrogates (TrainPoint).
#ifndef WEFT_SERVER_CONSOLE_STATE_H_
#define WEFT_SERVER_CONSOLE_STATE_H_

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/call/caller.h"
#include "server/call/service_core.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"

namespace weft::server::console {

// The most entries of each list. If more than kMaxAdapters adapters match,
// "adapters" has the most recently used ones.
inline constexpr size_t kMaxAdapters = 200;
inline constexpr size_t kMaxTenants = 100;
inline constexpr size_t kMaxErrors = 50;
inline constexpr size_t kMaxCheckpoints = 50;
inline constexpr size_t kMaxCompared = 8;

struct StateQuery {
  // "adapters" lists only adapters with this text in their id or tenant. Case
  // does not matter. An empty text matches all adapters.
  std::string search;
  // The id of the adapter that "selected" shows.
  std::string selected;
  // Asks for "history": [time, train, sampled] for each interval of
  // LoadHistory, where train and sampled are tokens per second.
  bool history = false;
  // Asks for "compared": the curve of this name of the kMaxCompared listed
  // adapters that were used last. Empty: does not ask.
  std::string compare;
};

// Returns the JSON that is described at the head of this file. This takes some
// milliseconds if there are a thousand adapters.
// Threads: any.
nlohmann::json MakeState(const ServiceCore& core, const Caller& caller,
                         const StateQuery& query);

// Returns the latest kMaxCheckpoints checkpoints as a list, newest first.
nlohmann::json CheckpointsJson(std::vector<CheckpointInfo> checkpoints);

}  // namespace weft::server::console

#endif  // WEFT_SERVER_CONSOLE_STATE_H_
