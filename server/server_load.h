// Computes the load that GetInfo reports. The input is the server's metrics.
#ifndef WEFT_SERVER_SERVER_LOAD_H_
#define WEFT_SERVER_SERVER_LOAD_H_

#include "server/metric_values.h"
#include "weft/v1/server.pb.h"

namespace weft {

// The metrics of a start that restores --state-dir.
inline constexpr char kRestoringMetric[] = "weft_adapters_recovering";
inline constexpr char kRestoreSecondsMetric[] = "weft_recovery_seconds_left";

// Sets all fields of `load`. A metric that does not exist counts as 0.
// Threads: any.
void FillLoad(const MetricValues& values, v1::ServerLoad* load);

}  // namespace weft

#endif  // WEFT_SERVER_SERVER_LOAD_H_
