#include "src/store/store_metrics.h"

namespace weft::store {

StoreMetrics::StoreMetrics(prometheus::Registry* registry)
    : request_seconds(
          registry, "weft_store_request_seconds",
          "Seconds of a request to the object store, failed ones included.",
          ExponentialBuckets(0.001, 2, 15), "operation",
          {"create", "swap", "get", "list", "delete", "upload"}),
      retries(AddCounter(registry, "weft_store_retries_total",
                         "Requests to the object store that were repeated.")) {}

}  // namespace weft::store
