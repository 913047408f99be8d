#include "src/engine/device/device_error.h"

#include "gtest/gtest.h"

namespace weft::engine {
namespace {

TEST(DeviceErrorTest, ADeviceThatAnswersIsThere) {
  EXPECT_FALSE(IsLost({.waiting = 0, .again = 0}));
}

TEST(DeviceErrorTest, AnErrorOfOneCallIsForgotten) {
  constexpr int kInvalidValue = 1;
  constexpr int kMemoryAllocation = 2;
  constexpr int kInvalidConfiguration = 9;
  constexpr int kNoKernelImage = 209;
  constexpr int kLaunchOutOfResources = 701;
  for (const int error :
       {kInvalidValue, kMemoryAllocation, kInvalidConfiguration, kNoKernelImage,
        kLaunchOutOfResources}) {
    EXPECT_FALSE(IsLost({.waiting = error, .again = 0})) << error;
  }
}

TEST(DeviceErrorTest, AnErrorThatStaysIsTheEnd) {
  EXPECT_TRUE(IsLost({.waiting = 1, .again = 1}));
  EXPECT_TRUE(IsLost({.waiting = 0, .again = 46}));
}

TEST(DeviceErrorTest, AfterSomeErrorsTheContextIsUndefinedWhateverItSays) {
  constexpr int kEccUncorrectable = 214;
  constexpr int kIllegalAddress = 700;
  constexpr int kAssert = 710;
  constexpr int kLaunchFailure = 719;
  for (const int error :
       {kEccUncorrectable, kIllegalAddress, kAssert, kLaunchFailure}) {
    EXPECT_TRUE(IsLost({.waiting = error, .again = 0})) << error;
  }
}

}  // namespace
}  // namespace weft::engine
