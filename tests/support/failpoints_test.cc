#include "tests/support/failpoints.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <iostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "src/base/files/failpoint.h"

namespace weft {
namespace {

class FailpointsTest : public testing::Test {
 protected:
  ~FailpointsTest() override { SetFailpoints(""); }

  // Returns the errno of each of `count` hits.
  static std::vector<int> Hits(const char* name, int count) {
    std::vector<int> errors;
    for (int i = 0; i < count; ++i) {
      errno = 0;
      Failpoint(name);
      errors.push_back(errno);
    }
    return errors;
  }
};

TEST_F(FailpointsTest, DoNothingUntilTheyAreSet) {
  SetFailpoints("");
  EXPECT_EQ(Hits("a.b", 2), (std::vector<int>{0, 0}));
  EXPECT_EQ(FailpointHits("a.b"), 2);
  EXPECT_EQ(FailpointHits("a.c"), 0);
}

TEST_F(FailpointsTest, FailTheHitsThatTheyAreSetFor) {
  SetFailpoints("a.b=err(EIO)#2|err(ENOSPC)#4-5;x=err(EIO)");
  EXPECT_EQ(Hits("a.b", 6), (std::vector<int>{0, EIO, 0, ENOSPC, ENOSPC, 0}));
  EXPECT_EQ(Hits("a.bc", 1), std::vector<int>{0});
}

TEST_F(FailpointsTest, AStarStandsForTheRestOfTheName) {
  SetFailpoints("a.*=err(EMFILE)");
  EXPECT_EQ(Hits("a.b", 1), std::vector<int>{EMFILE});
  EXPECT_EQ(Hits("a", 1), std::vector<int>{0});
}

TEST_F(FailpointsTest, DrawTheSameHitsFromTheSameSeed) {
  const std::string half = "a=err(EIO)@0.5";
  SetFailpoints(half, 1);
  const std::vector<int> first = Hits("a", 100);
  const auto failed = std::count(first.begin(), first.end(), EIO);
  EXPECT_GT(failed, 20);
  EXPECT_LT(failed, 80);
  SetFailpoints(half, 1);
  EXPECT_EQ(Hits("a", 100), first);
  SetFailpoints(half, 2);
  EXPECT_NE(Hits("a", 100), first);
}

TEST_F(FailpointsTest, ShortenWritesAndTakeTime) {
  SetFailpoints("w=short;s=sleep(30)");
  size_t size = 100;
  EXPECT_FALSE(Failpoint("w", &size));
  EXPECT_EQ(size, 50);
  size = 1;
  EXPECT_FALSE(Failpoint("w", &size));
  EXPECT_EQ(size, 1);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(Failpoint("s"));
  EXPECT_GE(std::chrono::steady_clock::now() - start,
            std::chrono::milliseconds(30));
}

TEST_F(FailpointsTest, KillTheProcess) {
  EXPECT_EXIT(
      {
        SetFailpoints("k=kill#3");
        Hits("k", 2);
        std::cerr << "two hits\n";
        Hits("k", 1);
      },
      testing::KilledBySignal(SIGKILL), "two hits\nfailpoint k kills");
}

TEST_F(FailpointsTest, RefuseWhatMakesNoSense) {
  for (const char* text :
       {"a", "a=", "a=b", "a=err(EWRONG)", "a=kill@x", "a=short#", "=kill"}) {
    EXPECT_DEATH(SetFailpoints(text), "makes no sense") << text;
  }
}

}  // namespace
}  // namespace weft
