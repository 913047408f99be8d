#include "src/store/s3_client.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/store/xml.h"

namespace weft::store {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(2);
// A connection slower than this is too slow to work with.
constexpr double kBytesPerSecond = 1 << 20;

// What the operator can do about an answer.
struct Advice {
  std::string_view code;
  absl::StatusCode status;
  std::string_view text;
};
constexpr std::array kAdvice = {
    Advice{"AccessDenied", absl::StatusCode::kPermissionDenied,
           "the credentials have no permission for this: they must be able to "
           "read, write, list and delete below the prefix"},
    Advice{"InvalidAccessKeyId", absl::StatusCode::kPermissionDenied,
           "the store does not know AWS_ACCESS_KEY_ID"},
    Advice{"SignatureDoesNotMatch", absl::StatusCode::kPermissionDenied,
           "the secret key is not that of the access key"},
    Advice{"RequestTimeTooSkewed", absl::StatusCode::kPermissionDenied,
           "this machine's clock is wrong"},
    Advice{"InvalidToken", absl::StatusCode::kPermissionDenied,
           "AWS_SESSION_TOKEN is not valid"},
    Advice{"NoSuchBucket", absl::StatusCode::kFailedPrecondition,
           "create the bucket, or correct its name"},
    Advice{"PermanentRedirect", absl::StatusCode::kFailedPrecondition,
           "the bucket is in another region: set AWS_REGION"},
    Advice{"AuthorizationHeaderMalformed",
           absl::StatusCode::kFailedPrecondition,
           "the bucket may be in another region: set AWS_REGION"},
};

// Reads the store's own words. The answer to a request that takes long may be
// an error in spite of its status 200.
void ReadError(S3Answer* answer) {
  const HttpAnswer& http = answer->http;
  if (http.status / 100 == 2 && http.body.find("<Error") == std::string::npos) {
    return;
  }
  const absl::StatusOr<XmlElement> xml = ParseXml(http.body);
  if (!xml.ok() || xml->name != "Error") return;
  constexpr size_t kMaxBytes = 300;
  const auto text = [&](const char* name) {
    return absl::CHexEscape(xml->TextOf(name).substr(0, kMaxBytes));
  };
  answer->error_code = text("Code");
  answer->error_message = text("Message");
  if (answer->error_code == "PreconditionFailed") answer->http.status = 412;
}

bool MayRepeat(const absl::StatusOr<S3Answer>& answer) {
  if (!answer.ok()) {
    return absl::IsUnavailable(answer.status()) ||
           absl::IsDeadlineExceeded(answer.status());
  }
  const std::string& code = answer->error_code;
  const int status = answer->http.status;
  if (status == 409) {
    return code == "ConditionalRequestConflict" || code == "OperationAborted";
  }
  return status == 408 || status == 429 || (status >= 500 && status != 501) ||
         code == "RequestTimeout" || code == "InternalError" ||
         code == "SlowDown" || code == "ExpiredToken";
}

// Returns up to this time, at random, so that processes do not come together.
absl::Duration Jitter(absl::Duration longest) {
  thread_local std::mt19937_64 random{std::random_device{}()};
  return longest * std::uniform_real_distribution<>(0.5, 1.0)(random);
}

// Returns the header with the sum of the body; none if OpenSSL may not compute
// it. Without it, SeaweedFS 4.48 keeps an empty object if the connection ends
// before the body's first byte, as when the process is killed.
std::optional<std::string> SumHeader(
    const std::vector<std::string_view>& body) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> sum(
      EVP_MD_CTX_new(), EVP_MD_CTX_free);
  std::string digest(EVP_MAX_MD_SIZE, '\0');
  unsigned int size = 0;
  bool computed = EVP_DigestInit_ex(sum.get(), EVP_md5(), nullptr) == 1;
  for (const std::string_view piece : body) {
    computed = computed &&
               EVP_DigestUpdate(sum.get(), piece.data(), piece.size()) == 1;
  }
  computed = computed &&
             EVP_DigestFinal_ex(sum.get(),
                                reinterpret_cast<unsigned char*>(digest.data()),
                                &size) == 1;
  if (!computed) return std::nullopt;
  digest.resize(size);
  return "content-md5: " + absl::Base64Escape(digest);
}

absl::Duration TimeOf(uint64_t bytes) {
  return absl::Seconds(static_cast<double>(bytes) / kBytesPerSecond);
}

}  // namespace

S3Client::S3Client(S3Options options)
    : options_(std::move(options)), credentials_(&http_, options_.region) {}

std::string S3Client::NameOf(const std::string& key) const {
  return absl::StrCat("s3://", options_.bucket, "/", options_.prefix, key);
}

std::string S3Client::Describe(const S3Request& request) const {
  return absl::StrCat(request.method, " ", NameOf(request.key));
}

std::string S3Client::Url(const S3Request& request) const {
  std::string url = options_.endpoint;
  if (options_.path_style) {
    absl::StrAppend(&url, "/", PercentEncode(options_.bucket));
  } else {
    url.insert(url.find("://") + 3, options_.bucket + ".");
  }
  url += "/";
  if (!request.key.empty()) {
    url += PercentEncode(options_.prefix + request.key, "/");
  }
  char separator = '?';
  for (const auto& [name, value] : request.query) {
    // The '=' is part of what is signed, also before an empty value.
    url += separator + PercentEncode(name) + "=" + PercentEncode(value);
    separator = '&';
  }
  return url;
}

absl::StatusOr<S3Answer> S3Client::Attempt(
    const S3Request& request, const std::optional<std::string>& sum,
    absl::Duration patience) {
  WEFT_ASSIGN_OR_RETURN(const Credentials credentials, credentials_.Get());
  const Signature signature = {
      .key_id = credentials.key_id,
      .secret_key = credentials.secret_key,
      .provider = absl::StrCat("aws:amz:", options_.region, ":s3")};
  HttpRequest http = {
      .method = request.method,
      .url = Url(request),
      .headers = request.headers,
      .body = request.body,
      .signature = &signature,
      .max_answer_bytes = request.max_answer_bytes,
      .silence_limit = patience,
      .limit = patience +
               TimeOf(request.at_once * std::max(TotalBytes(request.body),
                                                 request.max_answer_bytes)),
      .max_upload_bytes_per_second = options_.max_upload_bytes_per_second};
  http.headers.push_back("x-amz-content-sha256: UNSIGNED-PAYLOAD");
  if (sum) http.headers.push_back(*sum);
  if (!credentials.session_token.empty()) {
    http.headers.push_back("x-amz-security-token: " +
                           credentials.session_token);
  }
  const absl::Time start = SteadyNow();
  absl::StatusOr<HttpAnswer> answer = http_.Send(http);
  if (options_.metrics != nullptr) {
    options_.metrics->request_seconds[static_cast<size_t>(request.operation)]
        .Observe(absl::ToDoubleSeconds(SteadyNow() - start));
  }
  if (!answer.ok()) return answer.status();
  S3Answer read = {.http = *std::move(answer)};
  ReadError(&read);
  if (read.error_code == "ExpiredToken") {
    credentials_.Expire(credentials.key_id);
  }
  return read;
}

absl::StatusOr<S3Answer> S3Client::Send(const S3Request& request) {
  const absl::Time start = SteadyNow();
  const absl::Time end = start + options_.time_limit;
  const std::optional<std::string> sum =
      request.body.empty() ? std::nullopt : SumHeader(request.body);
  absl::Duration pause = kFirstPause;
  for (int attempts = 1;; ++attempts) {
    const absl::Duration patience =
        options_.request_limit / (attempts == 1 ? 2 : 1);
    absl::StatusOr<S3Answer> answer =
        Attempt(request, sum,
                std::clamp(end - SteadyNow(), absl::Milliseconds(1), patience));
    const absl::Duration wait = Jitter(pause);
    if (!MayRepeat(answer) || SteadyNow() + wait >= end) {
      const absl::Status error = ErrorOf(request, answer);
      if (error.ok()) return answer;
      if (attempts == 1) return error;
      return absl::Status(
          error.code(),
          absl::StrCat(error.message(), " (", attempts, " attempts in ",
                       absl::FormatDuration(absl::Trunc(
                           SteadyNow() - start, absl::Milliseconds(10))),
                       ")"));
    }
    if (options_.metrics != nullptr) options_.metrics->retries.Increment();
    if (!http_.Sleep(wait)) {
      return absl::CancelledError(Describe(request) + ": the process stops");
    }
    pause = std::min(pause * 2, kLongestPause);
  }
}

absl::Status S3Client::Unexpected(const S3Request& request,
                                  const S3Answer& answer) const {
  std::string text =
      absl::StrCat(Describe(request), ": HTTP ", answer.http.status);
  if (!answer.error_code.empty()) {
    absl::StrAppend(&text, " ", answer.error_code, ": ", answer.error_message);
  }
  for (const Advice& advice : kAdvice) {
    if (advice.code == answer.error_code) {
      return absl::Status(
          advice.status,
          absl::StrCat(text, " (", std::string(advice.text), ")"));
    }
  }
  if (answer.http.status == 401 || answer.http.status == 403) {
    return absl::PermissionDeniedError(text);
  }
  return absl::InternalError(text);
}

absl::Status S3Client::ErrorOf(const S3Request& request,
                               const absl::StatusOr<S3Answer>& answer) const {
  if (!answer.ok()) {
    // No answer but an object may be large.
    const bool no_object = absl::IsResourceExhausted(answer.status()) &&
                           request.operation != StoreOperation::kGet;
    return absl::Status(
        no_object ? absl::StatusCode::kInternal : answer.status().code(),
        absl::StrCat(Describe(request), ": ", answer.status().message()));
  }
  if (MayRepeat(answer)) {
    return absl::UnavailableError(Unexpected(request, *answer).message());
  }
  const int status = answer->http.status;
  const bool of_bucket =
      request.key.empty() || answer->error_code == "NoSuchBucket";
  if (answer->ok() || (status == 404 && !of_bucket) || status == 409 ||
      status == 412 || status == 416 ||
      (status == 501 && request.operation == StoreOperation::kDelete)) {
    return absl::OkStatus();
  }
  return Unexpected(request, *answer);
}

}  // namespace weft::store
