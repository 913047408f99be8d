#ifndef WEFT_SRC_STORE_STORE_METRICS_H_
#define WEFT_SRC_STORE_STORE_METRICS_H_

#include "src/base/observe/metrics.h"

namespace weft::store {

// The kinds of requests to a store. kUpload is a part of a large object.
enum class StoreOperation { kCreate, kSwap, kGet, kList, kDelete, kUpload };

struct StoreMetrics {
  explicit StoreMetrics(prometheus::Registry* registry);

  // Seconds of each request, also of those that fail. Indexed by
  // StoreOperation.
  LabelledHistograms request_seconds;
  prometheus::Counter& retries;
};

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_STORE_METRICS_H_
