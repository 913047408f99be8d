// Checks that an object store keeps what ObjectStore promises, under races and
// when writers stop or die in the middle of a write.
#ifndef WEFT_CLIENT_WEFTCTL_STORE_PROBE_H_
#define WEFT_CLIENT_WEFTCTL_STORE_PROBE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/store/s3_client.h"

namespace weft::client::weftctl {

struct ProbeResult {
  std::string check;
  bool ok = false;
  std::string detail;
};

// Writes below probe/, and deletes what it wrote. Each race repeats for a part
// of `duration`. Starts processes, so call it before the process has other
// threads. Errors: those of CheckConditions, and of a store that does not
// answer.
absl::StatusOr<std::vector<ProbeResult>> ProbeStore(
    const store::S3Options& options, absl::Duration duration);

}  // namespace weft::client::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_STORE_PROBE_H_
