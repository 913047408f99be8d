// Sends signed requests to a store with the S3 API, and repeats those that fail
// for a while.
#ifndef WEFT_SRC_STORE_S3_CLIENT_H_
#define WEFT_SRC_STORE_S3_CLIENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/store/credentials.h"
#include "src/store/http.h"
#include "src/store/object_store.h"
#include "src/store/store_metrics.h"

namespace weft::store {

struct S3Options {
  std::string bucket;
  std::string prefix;    // Empty, or ends with '/'.
  std::string endpoint;  // Such as "https://s3.eu-west-1.amazonaws.com".
  std::string region;
  // The bucket is in the path of URLs, and not in the name of the host.
  bool path_style = true;
  // No request of a call begins later than this, and a store that is silent
  // does not hold a call longer.
  absl::Duration time_limit = absl::Seconds(10);
  // The time of one request, besides that of its bytes. The first attempt has
  // half of it, so that a lost connection does not cost an owner its log.
  absl::Duration request_limit = absl::Seconds(5);
  // Objects with more bytes are sent in parts of this size. Stores want at
  // least 5 MiB, and have at most 10,000 parts of an object.
  uint64_t part_bytes = kMaxAtomicBytes;
  uint64_t max_upload_bytes_per_second = 0;  // 0: no limit.
  StoreMetrics* metrics = nullptr;           // Outlives the store. May be null.
};

struct S3Request {
  StoreOperation operation;
  std::string method;
  std::string key;  // Below the prefix. Empty: the request is for the bucket.
  std::vector<std::pair<std::string, std::string>> query;  // Sorted by name.
  std::vector<std::string> headers;
  std::vector<std::string_view> body;
  uint64_t max_answer_bytes = 64 << 10;
  size_t at_once = 1;  // So many of such a size share the network.
};

struct S3Answer {
  HttpAnswer http;
  std::string error_code;     // The store's <Code>, such as "SlowDown".
  std::string error_message;  // The store's <Message>.

  bool ok() const { return http.status / 100 == 2 && error_code.empty(); }
};

// Threads: any.
class S3Client {
 public:
  explicit S3Client(S3Options options);

  // Returns an answer that is ok() or has status 404 (of a key), 409, 412 or
  // 416. Errors: those of object_store.h.
  absl::StatusOr<S3Answer> Send(const S3Request& request);

  // Returns an error for an answer of Send that the caller did not expect.
  absl::Status Unexpected(const S3Request& request,
                          const S3Answer& answer) const;

  std::string NameOf(const std::string& key) const;
  const S3Options& options() const { return options_; }
  void Stop() { http_.Stop(); }

 private:
  std::string Url(const S3Request& request) const;
  absl::StatusOr<S3Answer> Attempt(const S3Request& request,
                                   const std::optional<std::string>& sum,
                                   absl::Duration patience);
  absl::Status ErrorOf(const S3Request& request,
                       const absl::StatusOr<S3Answer>& answer) const;
  std::string Describe(const S3Request& request) const;

  const S3Options options_;
  HttpClient http_;
  CredentialSource credentials_;
};

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_S3_CLIENT_H_
