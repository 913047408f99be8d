// Matchers for absl::Status and absl::StatusOr.
//
//   EXPECT_THAT(Validate(request), IsOk());
//   EXPECT_THAT(result, IsStatus(absl::StatusCode::kNotFound, "adapter"));
//   EXPECT_THAT(result, IsOkAndHolds(3));
#ifndef WEFT_TESTS_SUPPORT_STATUS_MATCHERS_H_
#define WEFT_TESTS_SUPPORT_STATUS_MATCHERS_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"

namespace weft {

inline absl::Status StatusOf(const absl::Status& status) { return status; }

template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

MATCHER(IsOk, negation ? "is an error" : "is OK") {
  const absl::Status status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.ok();
}

// `part` must occur in the message.
MATCHER_P2(IsStatus, code, part,
           "has code " + absl::StatusCodeToString(code) +
               " and a message containing \"" + std::string(part) + "\"") {
  const absl::Status status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         std::string(status.message()).find(part) != std::string::npos;
}

MATCHER_P(IsOkAndHolds, value,
          "is OK and holds " + ::testing::PrintToString(value)) {
  const absl::Status status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.ok() && ::testing::ExplainMatchResult(::testing::Eq(value),
                                                      *arg, result_listener);
}

}  // namespace weft

#endif  // WEFT_TESTS_SUPPORT_STATUS_MATCHERS_H_
