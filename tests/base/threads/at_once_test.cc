#include "src/base/threads/at_once.h"

#include <atomic>
#include <cstddef>
#include <latch>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft {
namespace {

TEST(AtOnceTest, RunsEachOnceWhateverTheNumberOfThreads) {
  for (const size_t most : {1, 3, 50}) {
    std::vector<int> runs(20);
    EXPECT_EQ(RunAtOnce(20, most,
                        [&](size_t i) {
                          ++runs[i];
                          return absl::OkStatus();
                        }),
              absl::OkStatus());
    EXPECT_EQ(runs, std::vector<int>(20, 1));
  }
  EXPECT_EQ(RunAtOnce(0, 4, [](size_t) { return absl::UnknownError(""); }),
            absl::OkStatus());
}

TEST(AtOnceTest, AsManyRunAtOnceAsAllowed) {
  std::latch all{4};  // Each waits for the others.
  EXPECT_EQ(RunAtOnce(4, 4,
                      [&](size_t) {
                        all.arrive_and_wait();
                        return absl::OkStatus();
                      }),
            absl::OkStatus());
}

TEST(AtOnceTest, AnErrorEndsTheRestAndTheFirstIsReturned) {
  std::atomic<int> runs{0};
  std::latch both{2};
  const absl::Status status = RunAtOnce(100, 2, [&](size_t i) {
    ++runs;
    both.arrive_and_wait();  // So both fail.
    return absl::InternalError(absl::StrCat(i));
  });
  EXPECT_THAT(status, IsStatus(absl::StatusCode::kInternal, "0"));
  EXPECT_EQ(runs, 2);
}

}  // namespace
}  // namespace weft
