#include "src/directory/arrivals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"

namespace weft::directory {
namespace {

using store::MemoryObjects;
using store::MemoryStore;
using ::testing::IsEmpty;
using enum absl::StatusCode;
using Fate = MemoryObjects::Fate;

// The mailboxes of the owners of logs 0, which sends, and 1.
class ArrivalsTest : public ::testing::Test {
 protected:
  static Arrival Message(const std::string& adapter, const std::string& entry) {
    return {.from = 0,
            .unit = adapter,
            .entry = entry,
            .record = std::string("\0\n\xff", 3)};
  }

  MemoryObjects objects_;
  MemoryStore store_{&objects_};
  bool answers_ = true;
  Arrivals zero_{&store_, 0, [this] { return answers_; }};
  Arrivals one_{&store_, 1, [this] { return answers_; }};
};

TEST_F(ArrivalsTest, WhatIsSentIsFound) {
  EXPECT_THAT(one_.Find(1), IsStatus(kNotFound, ""));
  ASSERT_THAT(zero_.Send(1, Message("t/a", "e")), IsOk());
  const FoundArrival found = one_.Find(1).value();
  EXPECT_EQ(found.arrival.from, 0);
  EXPECT_EQ(found.arrival.unit, "t/a");
  EXPECT_EQ(found.arrival.entry, "e");
  EXPECT_EQ(found.arrival.record, Message("t/a", "e").record);
  EXPECT_EQ(found.arrival.refused, "");
  ASSERT_THAT(one_.Remove(found), IsOk());
  EXPECT_THAT(objects_.objects, IsEmpty());
}

TEST_F(ArrivalsTest, OneAdapterAtATimeIsOnItsWay) {
  ASSERT_THAT(zero_.Send(1, Message("a", "e")), IsOk());
  EXPECT_THAT(zero_.Send(1, Message("a", "e")), IsOk());  // Sent again.
  EXPECT_THAT(zero_.Send(1, Message("a", "f")), IsStatus(kAlreadyExists, ""));
  Arrival other = Message("a", "e");
  other.from = 2;
  EXPECT_THAT(zero_.Send(1, other), IsStatus(kAlreadyExists, ""));
}

TEST_F(ArrivalsTest, ARefusalTellsTheSenderWhy) {
  ASSERT_THAT(zero_.Send(1, Message("a", "e")), IsOk());
  ASSERT_THAT(one_.Refuse(*one_.Find(1), "no room"), IsOk());
  const FoundArrival found = zero_.Find(1).value();
  EXPECT_EQ(found.arrival.refused, "no room");
  EXPECT_EQ(found.arrival.entry, "e");
  ASSERT_THAT(zero_.Recall(1, "e"), IsOk());
  EXPECT_THAT(objects_.objects, IsEmpty());
}

TEST_F(ArrivalsTest, ALogRecallsOnlyItsOwnMessage) {
  ASSERT_THAT(zero_.Send(1, Message("a", "e")), IsOk());
  const FoundArrival first = one_.Find(1).value();
  ASSERT_THAT(zero_.Recall(1, "another"), IsOk());
  ASSERT_THAT(one_.Recall(1, "e"), IsOk());
  EXPECT_EQ(objects_.objects.size(), 1);
  ASSERT_THAT(zero_.Recall(1, "e"), IsOk());
  EXPECT_THAT(zero_.Recall(1, "e"), IsOk());
  // The receiver still has the first message, and spares the next one.
  ASSERT_THAT(zero_.Send(1, Message("b", "f")), IsOk());
  ASSERT_THAT(one_.Remove(first), IsOk());
  ASSERT_THAT(one_.Refuse(first, "no"), IsOk());
  EXPECT_EQ(one_.Find(1)->arrival.refused, "");
}

TEST_F(ArrivalsTest, ALostAnswerIsNoSecondMessage) {
  objects_.fate = [](const auto&, const auto&) { return Fate::kLost; };
  EXPECT_THAT(zero_.Send(1, Message("a", "e")), IsStatus(kUnavailable, "lost"));
  objects_.fate = nullptr;
  EXPECT_THAT(zero_.Send(1, Message("a", "e")), IsOk());
}

TEST_F(ArrivalsTest, ADamagedMessageIsNamed) {
  for (const char* bytes : {"", "{}", "{}\n", "[1]\nx"}) {
    objects_.objects["arrivals/1"] = {.bytes = bytes, .etag = "x"};
    EXPECT_THAT(one_.Find(1), IsStatus(kDataLoss, "arrivals/1")) << bytes;
  }
}

TEST_F(ArrivalsTest, AStoreThatDoesNotAnswerIsNotAsked) {
  objects_.before = [](const std::string&, const std::string&) { FAIL(); };
  answers_ = false;
  EXPECT_THAT(one_.Find(1), IsStatus(kUnavailable, ""));
  EXPECT_THAT(zero_.Send(1, Message("a", "e")), IsStatus(kUnavailable, ""));
}

}  // namespace
}  // namespace weft::directory
