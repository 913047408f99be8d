// What the client of S3 does with each kind of answer.
#include "src/store/s3_store.h"

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "src/base/clock.h"
#include "src/store/open_store.h"
#include "tests/store/canned_http.h"
#include "tests/support/status_matchers.h"

namespace weft::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kHost[] = "127.0.0.1";
constexpr char kSecret[] = "Se/cr+et";
constexpr char kToken[] = "To/ken+12345";

class S3StoreTest : public ::testing::Test {
 protected:
  S3StoreTest() {
    setenv("AWS_ACCESS_KEY_ID", "KEYID", 1);
    setenv("AWS_SECRET_ACCESS_KEY", kSecret, 1);
    setenv("AWS_SESSION_TOKEN", kToken, 1);
    setenv("NO_PROXY", kHost, 1);
  }
  ~S3StoreTest() override {
    for (const char* name : {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
                             "AWS_SESSION_TOKEN", "NO_PROXY"}) {
      unsetenv(name);
    }
  }

  // Starts a server and a store that uses it.
  S3Store& Start(CannedHttp::Handler handler, S3Options options = {}) {
    server_ = std::make_unique<CannedHttp>(std::move(handler));
    options.bucket = "bucket";
    options.prefix = "pre/fix/";
    options.region = "eu-west-1";
    options.endpoint = server_->url();
    store_ = std::make_unique<S3Store>(options);
    return *store_;
  }
  // Starts a server with these answers, the last of which it repeats.
  S3Store& StartWith(std::vector<std::string> answers, S3Options options = {}) {
    return Start(
        [answers = std::move(answers), next = size_t{0}](auto&) mutable {
          return answers[std::min(next++, answers.size() - 1)];
        },
        options);
  }
  std::string Request(size_t index) { return server_->requests().at(index); }

  std::unique_ptr<CannedHttp> server_;
  std::unique_ptr<S3Store> store_;
};

const std::string kCreated = Answer("200 OK", "", "ETag: \"e1\"\r\n");

TEST_F(S3StoreTest, ARequestIsSignedAndHasItsCondition) {
  S3Store& store = StartWith({kCreated});
  EXPECT_THAT(store.Create("a b/+", {"by", "tes"}), IsOkAndHolds("e1"));
  EXPECT_THAT(Request(0),
              AllOf(HasSubstr("PUT /bucket/pre/fix/a%20b/%2B HTTP/1.1\r\n"),
                    HasSubstr("\r\nif-none-match: *\r\n"),
                    HasSubstr("\r\nx-amz-content-sha256: UNSIGNED-PAYLOAD\r\n"),
                    HasSubstr("Credential=KEYID/"), HasSubstr("/eu-west-1/s3/"),
                    HasSubstr("if-none-match;x-amz-content-sha256;x-amz-date;"
                              "x-amz-security-token, Signature="),
                    HasSubstr(absl::StrCat("x-amz-security-token: ", kToken)),
                    ::testing::EndsWith("\r\n\r\nbytes")));
  EXPECT_THAT(store.Swap("a", "new", "old"), IsOkAndHolds("e1"));
  EXPECT_THAT(Request(1), HasSubstr("\r\nif-match: \"old\"\r\n"));
  // The connection is kept.
  EXPECT_EQ(server_->num_connections(), 1u);
}

TEST_F(S3StoreTest, TheBucketMayBeInTheHost) {
  const S3Options options = {.bucket = "bucket",
                             .endpoint = "http://store.invalid",
                             .region = "eu-west-1",
                             .path_style = false,
                             .time_limit = absl::Milliseconds(1)};
  S3Store store(options);
  EXPECT_THAT(store.Get("a", 1),
              IsStatus(absl::StatusCode::kUnavailable, "bucket.store.invalid"));
}

TEST_F(S3StoreTest, QueriesAreSortedAndEncoded) {
  S3Store& store = StartWith({Answer(
      "200 OK",
      "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"http://s3\">"
      "<Contents><Key>pre/fix/a/&amp;&#x31;</Key><ETag>&quot;e&#34;</ETag>"
      "<Size>7</Size></Contents><IsTruncated>false</IsTruncated>"
      "</ListBucketResult>")});
  const auto listed = store.List("a/", "a/%", 5);
  ASSERT_THAT(listed, IsOk());
  ASSERT_EQ(listed->size(), 1u);
  EXPECT_EQ((*listed)[0].key, "a/&1");
  EXPECT_EQ((*listed)[0].etag, "e");
  EXPECT_EQ((*listed)[0].size, 7u);
  EXPECT_THAT(Request(0),
              HasSubstr("GET /bucket/?list-type=2&max-keys=5&prefix=pre%2Ffix"
                        "%2Fa%2F&start-after=pre%2Ffix%2Fa%2F%25 HTTP"));
}

TEST_F(S3StoreTest, WhatMayPassIsRepeated) {
  for (const std::string& answer :
       {std::string(kClose), ErrorAnswer("503 X", "SlowDown"),
        ErrorAnswer("500 X", "InternalError"), Answer("502 X"), Answer("429 X"),
        Answer("522 X"), ErrorAnswer("409 X", "ConditionalRequestConflict"),
        ErrorAnswer("400 X", "RequestTimeout")}) {
    S3Store& store = StartWith({answer, answer, kCreated});
    EXPECT_THAT(store.Create("a", {"1"}), IsOkAndHolds("e1")) << answer;
    EXPECT_GE(server_->requests().size(), 3u);
    // Both bodies are whole.
    EXPECT_THAT(Request(0), ::testing::EndsWith("\r\n\r\n1"));
    EXPECT_THAT(Request(2), ::testing::EndsWith("\r\n\r\n1"));
  }
}

TEST_F(S3StoreTest, WhatStaysIsNotRepeated) {
  using absl::StatusCode;
  const struct {
    std::string answer;
    StatusCode code;
    std::string text;
  } cases[] = {
      {ErrorAnswer("403 X", "AccessDenied", "no way"),
       StatusCode::kPermissionDenied,
       "PUT s3://bucket/pre/fix/a: HTTP 403 AccessDenied: no way (the "
       "credentials have no permission for this: "},
      {ErrorAnswer("403 X", "InvalidAccessKeyId"),
       StatusCode::kPermissionDenied, "does not know AWS_ACCESS_KEY_ID"},
      {ErrorAnswer("403 X", "SignatureDoesNotMatch"),
       StatusCode::kPermissionDenied, "the secret key is not"},
      {ErrorAnswer("403 X", "RequestTimeTooSkewed"),
       StatusCode::kPermissionDenied, "this machine's clock is wrong"},
      {ErrorAnswer("403 X", "Other"), StatusCode::kPermissionDenied, "Other"},
      {ErrorAnswer("404 X", "NoSuchBucket"), StatusCode::kFailedPrecondition,
       "create the bucket"},
      {ErrorAnswer("301 X", "PermanentRedirect"),
       StatusCode::kFailedPrecondition, "set AWS_REGION"},
      {ErrorAnswer("501 X", "NotImplemented"), StatusCode::kInternal,
       "HTTP 501 NotImplemented"},
      {Answer("200 OK", "<html>", ""), StatusCode::kOk, ""},
      {Answer("302 Found", "", "Location: /x\r\n"), StatusCode::kInternal,
       "HTTP 302"},
      {ErrorAnswer("412 X", "PreconditionFailed"), StatusCode::kAlreadyExists,
       "s3://bucket/pre/fix/a"}};
  for (const auto& [answer, code, text] : cases) {
    S3Store& store = StartWith({answer});
    EXPECT_THAT(store.Create("a", {"1"}).status(), IsStatus(code, text));
    EXPECT_EQ(server_->requests().size(), 1u) << answer;
  }
}

TEST_F(S3StoreTest, AMissingObjectIsNoMissingBucket) {
  using absl::StatusCode;
  S3Store& store = StartWith({ErrorAnswer("404 X", "NoSuchKey")});
  EXPECT_THAT(store.Get("a", 1), IsStatus(StatusCode::kNotFound, "fix/a"));
  EXPECT_THAT(store.Swap("a", "1", "e"), IsStatus(StatusCode::kAborted, "e"));
  EXPECT_THAT(store.Delete("a"), IsOk());
  EXPECT_THAT(store.DeleteIf("a", "e"), IsOk());
  S3Store& none = StartWith({ErrorAnswer("404 X", "NoSuchBucket")});
  for (const absl::Status& status :
       {none.Get("a", 1).status(), none.Swap("a", "1", "e").status(),
        none.Delete("a"), none.List("", "", 1).status()}) {
    EXPECT_THAT(status,
                IsStatus(StatusCode::kFailedPrecondition, "NoSuchBuck"));
  }
}

TEST_F(S3StoreTest, AStoreWithoutConditionsOnDeletionsDeletes) {
  S3Store& store = StartWith(
      {ErrorAnswer("501 X", "NotImplemented"), Answer("204 X", "", "")});
  EXPECT_THAT(store.DeleteIf("a", "e"), IsOk());
  EXPECT_EQ(server_->requests().size(), 2u);
}

TEST_F(S3StoreTest, AttemptsEndAfterTheLimit) {
  prometheus::Registry registry;
  StoreMetrics metrics(&registry);
  S3Store& store =
      StartWith({ErrorAnswer("503 X", "SlowDown", "slower")},
                {.time_limit = absl::Milliseconds(700), .metrics = &metrics});
  const absl::Time start = SteadyNow();
  EXPECT_THAT(
      store.Get("a", 1),
      IsStatus(absl::StatusCode::kUnavailable,
               "GET s3://bucket/pre/fix/a: HTTP 503 SlowDown: slower ("));
  EXPECT_LT(SteadyNow() - start, absl::Seconds(5));
  // Pauses double: from 50 ms on, four or five fit.
  const size_t attempts = server_->requests().size();
  EXPECT_THAT(attempts, AllOf(::testing::Ge(2u), ::testing::Le(8u)));
  EXPECT_EQ(metrics.retries.Value(), static_cast<double>(attempts - 1));
  EXPECT_EQ(metrics.request_seconds[2].Collect().histogram.sample_count,
            attempts);
}

TEST_F(S3StoreTest, ASilentStoreIsADeadline) {
  S3Store& store =
      StartWith({kHang}, {.time_limit = absl::Milliseconds(300),
                          .request_limit = absl::Milliseconds(200)});
  EXPECT_THAT(store.Create("a", {"1"}),
              IsStatus(absl::StatusCode::kDeadlineExceeded, "PUT s3://"));
}

TEST_F(S3StoreTest, AWriteHasTheSumOfItsBody) {
  S3Store& store = StartWith({kCreated}, {});
  ASSERT_THAT(store.Create("a", {"ab", "c"}), IsOk());
  // `printf abc | openssl md5 -binary | base64`
  EXPECT_THAT(server_->requests().back(),
              HasSubstr("content-md5: kAFQmDzST7DWlj99KOF/cg==\r\n"));
}

TEST_F(S3StoreTest, ALostConnectionCostsHalfOfARequestsTime) {
  S3Store& store =
      StartWith({kHang, kCreated}, {.request_limit = absl::Seconds(4)});
  const absl::Time start = SteadyNow();
  EXPECT_THAT(store.Create("a", {"1"}), IsOk());
  EXPECT_LT(SteadyNow() - start, absl::Milliseconds(3500));
}

TEST_F(S3StoreTest, AStoreThatIsAwayIsUnavailable) {
  S3Store& store =
      StartWith({kCreated}, {.time_limit = absl::Milliseconds(200)});
  server_.reset();
  EXPECT_THAT(store.Create("a", {"1"}),
              IsStatus(absl::StatusCode::kUnavailable, "attempts in"));
}

TEST_F(S3StoreTest, StopEndsACallThatWaits) {
  // One call waits for the answer, the other for its next attempt.
  for (const std::string& answer : {std::string(kHang), Answer("503 X")}) {
    S3Store& store = StartWith({answer}, {.time_limit = absl::Minutes(5),
                                          .request_limit = absl::Minutes(5)});
    absl::Status status;
    std::thread caller([&] { status = store.Create("a", {"1"}).status(); });
    while (server_->requests().empty()) absl::SleepFor(absl::Milliseconds(1));
    const absl::Time start = SteadyNow();
    store.Stop();
    caller.join();
    EXPECT_LT(SteadyNow() - start, absl::Seconds(5)) << answer;
    EXPECT_THAT(status, IsStatus(absl::StatusCode::kCancelled, "stops"));
  }
}

TEST_F(S3StoreTest, NoMessageHoldsASecret) {
  for (const std::string& answer :
       {std::string(kClose), ErrorAnswer("403 X", "AccessDenied"),
        Answer("500 X"), Answer("418 X")}) {
    S3Store& store =
        StartWith({answer}, {.time_limit = absl::Milliseconds(100)});
    testing::internal::CaptureStderr();
    std::string text = store.Create("a", {"1"}).status().ToString();
    text += store.Get("a", 1).status().ToString();
    text += store.List("a", "", 1).status().ToString();
    text += testing::internal::GetCapturedStderr();
    EXPECT_THAT(text, AllOf(HasSubstr("s3://bucket"), Not(HasSubstr(kSecret)),
                            Not(HasSubstr(kToken)), Not(HasSubstr("KEYID"))));
    EXPECT_THAT(Request(0), Not(HasSubstr(kSecret)));
  }
}

// Answers the requests of an upload in parts; `complete` answers the last one.
CannedHttp::Handler Upload(std::function<std::string()> complete) {
  return [complete](const std::string& request) {
    if (absl::StrContains(request, "?uploads= ")) {
      return Answer("200 OK",
                    "<InitiateMultipartUploadResult><UploadId>u/1</UploadId>"
                    "</InitiateMultipartUploadResult>");
    }
    if (absl::StartsWith(request, "POST ")) return complete();
    if (absl::StartsWith(request, "HEAD ")) return Answer("200 OK");
    if (absl::StartsWith(request, "DELETE ")) return Answer("204 X");
    return kCreated;
  };
}

const S3Options kSmallParts = {.time_limit = absl::Milliseconds(500),
                               .part_bytes = 4};

TEST_F(S3StoreTest, AnUploadHasItsConditionAtItsEnd) {
  S3Store& store = Start(Upload([] {
                           return Answer("200 OK",
                                         "<CompleteMultipartUploadResult><ETag>"
                                         "&quot;all-3&quot;</ETag>"
                                         "</CompleteMultipartUploadResult>");
                         }),
                         kSmallParts);
  EXPECT_THAT(store.Create("a", {"123", "456", "7890"}), IsOkAndHolds("all-3"));
  ASSERT_EQ(server_->requests().size(), 5u);
  const auto part = [](int number, const std::string& bytes) {
    return AllOf(HasSubstr(absl::StrCat("partNumber=", number, "&uploadId=u")),
                 ::testing::EndsWith("\r\n\r\n" + bytes),
                 Not(HasSubstr("if-none-match")));
  };
  const std::vector<std::string> parts = {Request(1), Request(2), Request(3)};
  EXPECT_THAT(parts, ::testing::UnorderedElementsAre(
                         part(1, "1234"), part(2, "5678"), part(3, "90")));
  EXPECT_THAT(
      Request(4),
      AllOf(HasSubstr("POST /bucket/pre/fix/a?uploadId=u%2F1 "),
            HasSubstr("\r\nif-none-match: *\r\n"),
            HasSubstr("<PartNumber>3</PartNumber><ETag>\"e1\"</ETag>")));
}

TEST_F(S3StoreTest, AnUploadThatFailsIsDropped) {
  using absl::StatusCode;
  const struct {
    std::string answer;
    StatusCode code;
  } cases[] = {
      {ErrorAnswer("412 X", "PreconditionFailed"), StatusCode::kAlreadyExists},
      // AWS says so after it has begun to answer.
      {ErrorAnswer("200 OK", "PreconditionFailed"), StatusCode::kAlreadyExists},
      {ErrorAnswer("200 OK", "InternalError"), StatusCode::kUnavailable},
      {ErrorAnswer("403 X", "AccessDenied"), StatusCode::kPermissionDenied}};
  for (const auto& [answer, code] : cases) {
    S3Store& store =
        Start(Upload([&answer = answer] { return answer; }), kSmallParts);
    EXPECT_THAT(store.Create("a", {"1234567890"}), IsStatus(code, "fix/a"));
    EXPECT_THAT(server_->requests().back(),
                HasSubstr("DELETE /bucket/pre/fix/a?uploadId=u%2F1 "));
  }
}

TEST_F(S3StoreTest, AnUploadWhoseLastAnswerWasLostExists) {
  int calls = 0;
  S3Store& store = Start(Upload([&]() -> std::string {
                           if (calls++ == 0) return Answer("500 X");
                           return ErrorAnswer("404 X", "NoSuchUpload");
                         }),
                         kSmallParts);
  EXPECT_THAT(store.Create("a", {"1234567890"}),
              IsStatus(absl::StatusCode::kAlreadyExists, "fix/a"));
}

TEST_F(S3StoreTest, AnAnswerThatIsNotTheApisIsAnError) {
  using absl::StatusCode;
  S3Store& store = StartWith({Answer("200 OK", "<html></html>")});
  EXPECT_THAT(store.List("", "", 1), IsStatus(StatusCode::kInternal, "200"));
  std::string bytes(4, ' ');
  uint64_t size = 0;
  // The server ignores the range.
  EXPECT_THAT(store.GetRange("a", 2, bytes, &size),
              IsStatus(StatusCode::kInternal, "200"));
  S3Store& endless = StartWith({Answer("400 X", std::string(1 << 20, 'x'))});
  EXPECT_THAT(endless.Create("a", {"1"}),
              IsStatus(StatusCode::kInternal, "the answer has more bytes"));
  S3Store& foreign = StartWith(
      {Answer("200 OK",
              "<ListBucketResult><Contents><Key>other/a</Key><Size>1</Size>"
              "</Contents></ListBucketResult>")});
  EXPECT_THAT(foreign.List("", "", 1), IsStatus(StatusCode::kInternal, "200"));
}

}  // namespace
}  // namespace weft::store
