// Opens a store by its URL, and checks that it keeps what ObjectStore promises.
#ifndef WEFT_SRC_STORE_OPEN_STORE_H_
#define WEFT_SRC_STORE_OPEN_STORE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/store/object_store.h"
#include "src/store/s3_client.h"

namespace weft::store {

// Returns a URL as messages may show it: without what stands before an `@`,
// which may be a secret.
std::string ShownUrl(const std::string& url);

// Returns the options of s3://BUCKET or s3://BUCKET/PREFIX, with the endpoint
// and the region of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL and AWS_REGION or
// AWS_DEFAULT_REGION. With an endpoint, the bucket is in the path of URLs.
// Errors: INVALID_ARGUMENT, which names the URL or the variable.
absl::StatusOr<S3Options> ParseS3Url(const std::string& url);

// Opens s3://BUCKET/PREFIX or file:///FOLDER. Sends no request, so wrong
// credentials are found by the first call. `metrics` may be null, and outlives
// the store. Errors: INVALID_ARGUMENT, and those of file_io.h.
absl::StatusOr<std::unique_ptr<ObjectStore>> OpenStore(const std::string& url,
                                                       StoreMetrics* metrics);

// The keys of the objects that CheckConditions writes begin with this.
inline constexpr char kProbePrefix[] = "probe/";

// Writes an object below kProbePrefix, and deletes it. Returns
// FAILED_PRECONDITION if the store ignores a condition: then two processes
// could own what only one may own. Other errors are those of object_store.h,
// and say what the credentials may not do.
absl::Status CheckConditions(ObjectStore* store);

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_OPEN_STORE_H_
