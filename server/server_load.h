// Computes the load that GetInfo reports. The input is the server's metrics.
#ifndef WEFT_SERVER_SERVER_LOAD_H_
#define WEFT_SERVER_SERVER_LOAD_H_

#include "prometheus/registry.h"
#include "weft/v1/server.pb.h"

namespace weft {

// Sets all fields of `load`. A metric that does not exist counts as 0. Takes
// about a millisecond. Threads: any.
void FillLoad(const prometheus::Registry& registry, v1::ServerLoad* load);

}  // namespace weft

#endif  // WEFT_SERVER_SERVER_LOAD_H_
