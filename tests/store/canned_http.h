// An HTTP server on loopback whose answers a test chooses.
#ifndef WEFT_TESTS_STORE_CANNED_HTTP_H_
#define WEFT_TESTS_STORE_CANNED_HTTP_H_

#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"

namespace weft::store {

// Returns an answer with a status such as "200 OK".
std::string Answer(std::string_view status, std::string_view body = "",
                   std::string_view headers = "");
// Returns an answer with S3's document of an error.
std::string ErrorAnswer(std::string_view status, std::string_view code,
                        std::string_view message = "message");

// A handler's answers that are none: the connection is closed, or stays open.
inline constexpr char kClose[] = "";
inline constexpr char kHang[] = "hang";

class CannedHttp {
 public:
  // Gets a request, with its head and body, and returns the answer. Calls are
  // one at a time, on the server's threads.
  using Handler = std::function<std::string(const std::string& request)>;

  explicit CannedHttp(Handler handler);
  ~CannedHttp();
  CannedHttp(const CannedHttp&) = delete;
  CannedHttp& operator=(const CannedHttp&) = delete;

  // Returns "http://127.0.0.1:PORT".
  const std::string& url() const { return url_; }
  // Returns the requests so far.
  std::vector<std::string> requests();
  // Returns how many connections were made so far.
  size_t num_connections();

 private:
  void Accept();
  void Serve(int fd);

  const Handler handler_;
  int listener_ = -1;
  std::string url_;
  Mutex mu_;
  std::vector<int> connections_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> requests_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  std::thread acceptor_;
};

}  // namespace weft::store

#endif  // WEFT_TESTS_STORE_CANNED_HTTP_H_
