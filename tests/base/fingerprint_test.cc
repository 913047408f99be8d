#include "src/base/fingerprint.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(FingerprintDifferenceTest, NamesPartsAndBothValues) {
  EXPECT_EQ(FingerprintDifference("ab hidden=64 qk_norm=1 rope=12",
                                  "cd hidden=128 layer.0=77 rope=12"),
            "hidden is 64, here 128; layer.0 is absent, here 77; qk_norm is 1, "
            "here absent");
}

TEST(FingerprintDifferenceTest, ShowsAFew) {
  EXPECT_EQ(FingerprintDifference("ab a=1 b=1 c=1 d=1 e=1 f=1",
                                  "cd a=2 b=2 c=2 d=2 e=2 f=2"),
            "a is 1, here 2; b is 1, here 2; c is 1, here 2; d is 1, here 2; "
            "and 2 more");
}

TEST(FingerprintDifferenceTest, SaysThatAnOlderOneHasNoParts) {
  EXPECT_EQ(FingerprintDifference("ab", "cd hidden=128"),
            "it has the fingerprint of an older server, which does not say "
            "what differs");
}

TEST(FingerprintDifferenceTest, EscapesAndCutsWhatAClientSent) {
  const std::string difference = FingerprintDifference(
      "ab \x01=" + std::string(1000, 'x') + " loose", "cd");
  EXPECT_EQ(difference, "\\x01 is " + std::string(100, 'x') +
                            ", here absent; loose is , here absent");
}

}  // namespace
}  // namespace weft
