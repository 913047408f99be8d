#include "gtest/gtest.h"
#include "src/dispatch/fair_shares.h"

namespace weft::dispatch {
namespace {

TEST(DeviceShareTest, HonoursTheShareWhateverThePlansLast) {
  for (const double share : {0.1, 0.5, 0.8}) {
    DeviceShare device(share);
    double train_seconds = 0;
    double decode_seconds = 0;
    for (int i = 0; i < 10000; ++i) {
      if (device.ChooseDecode(/*can_train=*/true, /*can_decode=*/true)) {
        device.AddDecoding(absl::Milliseconds(20));
        decode_seconds += 0.02;
      } else {
        device.AddTraining(absl::Milliseconds(300));
        train_seconds += 0.3;
      }
    }
    EXPECT_NEAR(decode_seconds / (decode_seconds + train_seconds), share, 0.01);
  }
}

TEST(DeviceShareTest, GivesTheDeviceToTheOnlyKindWithWork) {
  DeviceShare device(0.5);
  device.AddDecoding(absl::Hours(1));
  EXPECT_TRUE(device.ChooseDecode(/*can_train=*/false, /*can_decode=*/true));
  device.AddTraining(absl::Hours(2));
  EXPECT_FALSE(device.ChooseDecode(/*can_train=*/true, /*can_decode=*/false));
}

TEST(DeviceShareTest, IdleTimeEarnsNoCreditForEitherKind) {
  DeviceShare device(0.5);
  // Training runs alone for an hour, and then decoding alone for a second.
  EXPECT_FALSE(device.ChooseDecode(true, false));
  device.AddTraining(absl::Hours(1));
  EXPECT_FALSE(device.ChooseDecode(true, false));
  EXPECT_TRUE(device.ChooseDecode(false, true));
  device.AddDecoding(absl::Seconds(1));
  EXPECT_TRUE(device.ChooseDecode(false, true));
  // Now both kinds have work. The hour that training ran alone does not count
  // against training. The second of decoding does not count against decoding.
  EXPECT_FALSE(device.ChooseDecode(true, true));
  device.AddTraining(absl::Seconds(2));
  EXPECT_TRUE(device.ChooseDecode(true, true));
}

TEST(DeviceShareTest, WhatArrivesDuringATurnIsNext) {
  DeviceShare device(0.5);
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(device.ChooseDecode(/*can_train=*/true, /*can_decode=*/false));
    // A short sample arrives while a micro-batch runs for 2 s. The sample
    // decodes next and ends.
    device.AddTraining(absl::Seconds(2));
    EXPECT_TRUE(device.ChooseDecode(true, true));
    device.AddDecoding(absl::Milliseconds(20));
  }
}

TEST(DeviceShareTest, AfterIdlenessBothAreLevel) {
  DeviceShare device(0.5);
  EXPECT_FALSE(device.ChooseDecode(/*can_train=*/true, /*can_decode=*/false));
  device.AddTraining(absl::Hours(1));
  device.NoteIdle();
  EXPECT_TRUE(device.ChooseDecode(false, true));
  device.AddDecoding(absl::Seconds(1));
  EXPECT_FALSE(device.ChooseDecode(true, true));
}

}  // namespace
}  // namespace weft::dispatch
