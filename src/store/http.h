// Sends HTTP requests with libcurl. Keeps connections, so that a request to the
// same server needs no new handshake.
#ifndef WEFT_SRC_STORE_HTTP_H_
#define WEFT_SRC_STORE_HTTP_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"

namespace weft::store {

// Signs a request with AWS Signature Version 4.
struct Signature {
  std::string key_id;
  std::string secret_key;
  std::string provider;  // As of CURLOPT_AWS_SIGV4: "aws:amz:REGION:SERVICE".
};

struct HttpRequest {
  std::string method = "GET";
  // The signature covers the text as it stands: it must be percent-encoded, and
  // the query sorted.
  std::string url;
  std::vector<std::string> headers;  // "name: value"
  std::vector<std::string_view> body;
  const Signature* signature = nullptr;  // Null: the request is not signed.
  uint64_t max_answer_bytes = 1 << 20;
  absl::Duration connect_limit = absl::Seconds(2);
  // The time in which nothing may come or go, and the time of the request.
  absl::Duration silence_limit = absl::Seconds(5);
  absl::Duration limit = absl::Seconds(5);
  uint64_t max_upload_bytes_per_second = 0;  // 0: no limit.
  bool direct = false;                       // Uses no proxy.
};

struct HttpAnswer {
  int status = 0;
  std::map<std::string, std::string> headers;  // Names in lower case.
  std::string body;

  // Returns the value of a header, or "".
  std::string Header(const std::string& name) const;
};

// Returns the bytes of all pieces together.
uint64_t TotalBytes(const std::vector<std::string_view>& pieces);

// Returns `text` in which every byte but letters, digits, "-._~" and the bytes
// of `kept` is percent-encoded.
std::string PercentEncode(std::string_view text, std::string_view kept = "");

// Threads: any.
class HttpClient {
 public:
  HttpClient();
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // Sends the request and returns the answer, whatever its status is. Follows
  // no redirection. Verifies the certificate of an https server, with the
  // authorities of AWS_CA_BUNDLE or the system's. Errors: UNAVAILABLE,
  // DEADLINE_EXCEEDED, CANCELLED, FAILED_PRECONDITION (the certificate is not
  // trusted), RESOURCE_EXHAUSTED (the answer has more bytes than asked for).
  absl::StatusOr<HttpAnswer> Send(const HttpRequest& request);

  // Returns false at once if the client stops or has stopped.
  bool Sleep(absl::Duration duration);

  // Ends all calls, also later ones.
  void Stop();

 private:
  struct Connection;

  Connection* Take();
  void Put(Connection* connection);

  Mutex mu_;
  CondVar stopped_;
  std::atomic<bool> stopping_ = false;
  std::vector<std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mu_);
  std::vector<Connection*> idle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_HTTP_H_
