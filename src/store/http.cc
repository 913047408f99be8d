#include "src/store/http.h"

#include <curl/curl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/clock.h"

namespace weft::store {
namespace {

// libcurl's own state, for the whole life of the process.
void InitCurl() {
  static const CURLcode code = curl_global_init(CURL_GLOBAL_DEFAULT);
  static_cast<void>(code);
}

// One request under way: what its callbacks read and write.
struct Transfer {
  const HttpRequest& request;
  HttpAnswer answer;
  size_t piece = 0;   // The piece to send next,
  size_t offset = 0;  // and the first byte of it.
  bool too_large = false;
};

size_t OnRead(char* out, size_t size, size_t count, void* data) {
  auto& transfer = *static_cast<Transfer*>(data);
  const auto& body = transfer.request.body;
  size_t written = 0;
  while (transfer.piece < body.size() && written < size * count) {
    const std::string_view piece =
        body[transfer.piece].substr(transfer.offset, size * count - written);
    if (piece.empty()) {
      ++transfer.piece;
      transfer.offset = 0;
      continue;
    }
    std::memcpy(out + written, piece.data(), piece.size());
    written += piece.size();
    transfer.offset += piece.size();
  }
  return written;
}

// libcurl begins anew if a kept connection turns out to be closed.
int OnSeek(void* data, curl_off_t offset, int origin) {
  auto& transfer = *static_cast<Transfer*>(data);
  if (offset != 0 || origin != SEEK_SET) return CURL_SEEKFUNC_CANTSEEK;
  transfer.piece = 0;
  transfer.offset = 0;
  return CURL_SEEKFUNC_OK;
}

size_t OnWrite(char* bytes, size_t size, size_t count, void* data) {
  auto& transfer = *static_cast<Transfer*>(data);
  const size_t total = size * count;
  std::string& body = transfer.answer.body;
  transfer.too_large = body.size() + total > transfer.request.max_answer_bytes;
  if (transfer.too_large) return 0;
  body.append(bytes, total);
  return total;
}

size_t OnHeader(char* bytes, size_t size, size_t count, void* data) {
  const uint64_t max_bytes =
      static_cast<Transfer*>(data)->request.max_answer_bytes;
  auto& answer = static_cast<Transfer*>(data)->answer;
  const absl::string_view line(bytes, size * count);
  // The headers of "100 Continue" or of a repetition come before.
  if (line.substr(0, 5) == "HTTP/") answer.headers.clear();
  const size_t colon = line.find(':');
  if (colon != absl::string_view::npos) {
    answer.headers[absl::AsciiStrToLower(line.substr(0, colon))] =
        std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
  }
  uint64_t length = 0;
  if (line == "\r\n" &&
      absl::SimpleAtoi(answer.Header("content-length"), &length)) {
    // A large object is not copied as it grows.
    answer.body.reserve(std::min(length, max_bytes));
  }
  return size * count;
}

long Milliseconds(absl::Duration duration) {
  return static_cast<long>(
      std::max<int64_t>(1, absl::ToInt64Milliseconds(duration)));
}

absl::Status TransferError(CURLcode code, const char* detail) {
  const std::string text =
      detail[0] != '\0' ? detail : curl_easy_strerror(code);
  switch (code) {
    case CURLE_OPERATION_TIMEDOUT:
      return absl::DeadlineExceededError(text);
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
      return absl::FailedPreconditionError(text);
    default:
      return absl::UnavailableError(text);
  }
}

}  // namespace

// A handle, the connections that it keeps, and a loop that Stop() can end. It
// serves one request at a time.
struct HttpClient::Connection {
  CURL* easy = curl_easy_init();
  CURLM* multi = curl_multi_init();
  std::array<char, CURL_ERROR_SIZE> error = {};

  ~Connection() {
    curl_easy_cleanup(easy);
    curl_multi_cleanup(multi);
  }

  void SetUp(const HttpRequest& request, curl_slist* headers,
             Transfer* transfer);
  void SetMethod(const HttpRequest& request);
  absl::Status Run(const std::atomic<bool>& stopping);
};

void HttpClient::Connection::SetMethod(const HttpRequest& request) {
  if (request.method == "HEAD") {
    curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
    curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE,
                     static_cast<curl_off_t>(TotalBytes(request.body)));
    curl_easy_setopt(
        easy, CURLOPT_MAX_SEND_SPEED_LARGE,
        static_cast<curl_off_t>(request.max_upload_bytes_per_second));
  }
  curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST,
                   request.method == "HEAD" ? nullptr : request.method.c_str());
}

void HttpClient::Connection::SetUp(const HttpRequest& request,
                                   curl_slist* headers, Transfer* transfer) {
  curl_easy_reset(easy);  // Keeps the connections.
  error[0] = '\0';
  const auto set = [this](CURLoption option, auto value) {
    curl_easy_setopt(easy, option, value);
  };
  set(CURLOPT_URL, request.url.c_str());
  set(CURLOPT_PROTOCOLS_STR, "http,https");
  set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  // The path is signed as it stands.
  set(CURLOPT_PATH_AS_IS, 1L);
  set(CURLOPT_HTTPHEADER, headers);
  set(CURLOPT_ERRORBUFFER, error.data());
  set(CURLOPT_NOSIGNAL, 1L);
  // A name that is being resolved does not delay Stop().
  set(CURLOPT_QUICK_EXIT, 1L);
  set(CURLOPT_SSL_VERIFYPEER, 1L);
  set(CURLOPT_SSL_VERIFYHOST, 2L);
  const char* authorities = std::getenv("AWS_CA_BUNDLE");
  if (authorities != nullptr && authorities[0] != '\0') {
    set(CURLOPT_CAINFO, authorities);
  }
  if (request.direct) set(CURLOPT_NOPROXY, "*");
  set(CURLOPT_CONNECTTIMEOUT_MS, Milliseconds(request.connect_limit));
  set(CURLOPT_TIMEOUT_MS, Milliseconds(request.limit));
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);
  set(CURLOPT_LOW_SPEED_TIME,
      std::max(1L, (Milliseconds(request.silence_limit) + 999) / 1000));
  set(CURLOPT_READFUNCTION, &OnRead);
  set(CURLOPT_READDATA, transfer);
  set(CURLOPT_SEEKFUNCTION, &OnSeek);
  set(CURLOPT_SEEKDATA, transfer);
  set(CURLOPT_WRITEFUNCTION, &OnWrite);
  set(CURLOPT_WRITEDATA, transfer);
  set(CURLOPT_HEADERFUNCTION, &OnHeader);
  set(CURLOPT_HEADERDATA, transfer);
  SetMethod(request);
  if (request.signature != nullptr) {
    set(CURLOPT_AWS_SIGV4, request.signature->provider.c_str());
    set(CURLOPT_USERNAME, request.signature->key_id.c_str());
    set(CURLOPT_PASSWORD, request.signature->secret_key.c_str());
  }
}

absl::Status HttpClient::Connection::Run(const std::atomic<bool>& stopping) {
  curl_multi_add_handle(multi, easy);
  int running = 1;
  CURLMcode code = CURLM_OK;
  while (code == CURLM_OK && running != 0 && !stopping) {
    code = curl_multi_perform(multi, &running);
    if (code == CURLM_OK && running != 0) {
      code = curl_multi_poll(multi, nullptr, 0, 1000, nullptr);
    }
  }
  int left = 0;
  const CURLMsg* message = curl_multi_info_read(multi, &left);
  absl::Status status = absl::CancelledError("the process stops");
  if (code != CURLM_OK) {
    status = absl::UnavailableError(curl_multi_strerror(code));
  } else if (running == 0 && message != nullptr) {
    status = message->data.result == CURLE_OK
                 ? absl::OkStatus()
                 : TransferError(message->data.result, error.data());
  }
  curl_multi_remove_handle(multi, easy);
  return status;
}

std::string HttpAnswer::Header(const std::string& name) const {
  const auto it = headers.find(name);
  return it == headers.end() ? "" : it->second;
}

uint64_t TotalBytes(const std::vector<std::string_view>& pieces) {
  uint64_t bytes = 0;
  for (const std::string_view piece : pieces) bytes += piece.size();
  return bytes;
}

std::string PercentEncode(std::string_view text, std::string_view kept) {
  std::string encoded;
  for (const char c : text) {
    if (absl::ascii_isalnum(c) ||
        std::string_view("-._~").find(c) != std::string_view::npos ||
        kept.find(c) != std::string_view::npos) {
      encoded.push_back(c);
    } else {
      absl::StrAppendFormat(&encoded, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

HttpClient::HttpClient() { InitCurl(); }

HttpClient::~HttpClient() = default;

HttpClient::Connection* HttpClient::Take() {
  MutexLock lock(&mu_);
  if (idle_.empty()) {
    connections_.push_back(std::make_unique<Connection>());
    return connections_.back().get();
  }
  // The one that was used last has the warmest connection.
  Connection* connection = idle_.back();
  idle_.pop_back();
  return connection;
}

void HttpClient::Put(Connection* connection) {
  MutexLock lock(&mu_);
  idle_.push_back(connection);
}

absl::StatusOr<HttpAnswer> HttpClient::Send(const HttpRequest& request) {
  curl_slist* headers = nullptr;
  for (const std::string& header : request.headers) {
    headers = curl_slist_append(headers, header.c_str());
  }
  Transfer transfer{.request = request};
  Connection* connection = Take();
  connection->SetUp(request, headers, &transfer);
  absl::Status status = connection->Run(stopping_);
  long code = 0;
  curl_easy_getinfo(connection->easy, CURLINFO_RESPONSE_CODE, &code);
  Put(connection);
  curl_slist_free_all(headers);
  if (transfer.too_large) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the answer has more bytes than ", request.max_answer_bytes));
  }
  if (!status.ok()) return status;
  transfer.answer.status = static_cast<int>(code);
  return std::move(transfer.answer);
}

bool HttpClient::Sleep(absl::Duration duration) {
  const absl::Time end = SteadyNow() + duration;
  MutexLock lock(&mu_);
  while (!stopping_) {
    const absl::Duration left = end - SteadyNow();
    if (left <= absl::ZeroDuration()) return true;
    stopped_.WaitFor(&mu_, absl::ToChronoNanoseconds(left));
  }
  return false;
}

void HttpClient::Stop() {
  MutexLock lock(&mu_);
  stopping_ = true;
  stopped_.NotifyAll();
  for (const auto& connection : connections_) {
    curl_multi_wakeup(connection->multi);
  }
}

}  // namespace weft::store
