// Tests that copies of teachers, which are not on the device, count in the
// memory budget.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine/engine_fixture.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using ::weft::testing::Wait;
// So large that a copy takes more than the rest of a small batch.
constexpr int kRank = 8192;
// A micro-batch has room for this many tokens, which is one short datum.
constexpr int kNumTokens = 3;
// So many data that others come while the request runs, slice by slice.
constexpr int kMany = 20;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

class TeacherMemoryTest : public weft::testing::EngineFixture {
 protected:
  // Starts an engine whose two slots have the students "a" and "b", while the
  // teachers "s" and "t" are on disk.
  void StartWith(int64_t memory_budget_bytes) {
    EngineOptions options = Options();
    options.max_rank = kRank;
    options.max_resident_adapters = 2;
    options.adapter_host_bytes = -1;
    options.memory_budget_bytes = memory_budget_bytes;
    options.max_batch_tokens = batch_tokens_;
    Start(options);
    for (const char* id : {"s", "t"}) {
      ASSERT_THAT(Wait<AdapterInfo>([&](auto done) {
                    engine_->CreateAdapter(
                        {.adapter_id = id,
                         .config = {.rank = kRank, .alpha = 4, .seed = 5}},
                        done);
                  }),
                  IsOk());
    }
    ASSERT_THAT(Create("a"), IsOk());
    ASSERT_THAT(Create("b"), IsOk());
  }

  // Trains on `num_data` data, each of which is a slice of its own.
  std::future<absl::Status> Run(TrainRequest request, int num_data,
                                int num_tokens) {
    Datum datum;
    for (int32_t i = 0; i < num_tokens; ++i) {
      datum.tokens.push_back(i % 40);
      datum.targets.push_back((i + 1) % 40);
    }
    request.data.assign(num_data, datum);
    const auto promise = std::make_shared<std::promise<absl::Status>>();
    engine_->Train(request, [promise](const auto& reply) {
      promise->set_value(reply.status());
    });
    return promise->get_future();
  }

  std::future<absl::Status> Distil(const std::string& student,
                                   const Teacher& teacher, int num_data = 1) {
    TrainRequest request{.adapter_id = student};
    request.loss.function = LossFunction::kForwardKl;
    request.loss.teacher = teacher;
    return Run(request, num_data, kNumTokens);
  }

  // Trains without a teacher.
  std::future<absl::Status> Plain(const std::string& id, int num_data,
                                  int num_tokens) {
    return Run({.adapter_id = id}, num_data, num_tokens);
  }

  // Starts an engine with room for one copy and the slice that uses it.
  void StartWithRoomForOne() {
    StartWith(1);
    copy_ = BytesIn("a copy of its weights takes ");
    StartWith(copy_);
    alone_ = BytesIn("needs ");
    StartWith(alone_);
  }

  // Returns the number behind `word` in the error of a distillation.
  int64_t BytesIn(const std::string& word) {
    const absl::Status status = Distil("a", {.adapter_id = "t"}).get();
    EXPECT_THAT(status, IsStatus(kExhausted, word));
    const std::string text(status.message());
    return std::stoll(text.substr(text.find(word) + word.size()));
  }

  int64_t batch_tokens_ = kNumTokens;
  int64_t copy_ = 0;   // Bytes of a copy.
  int64_t alone_ = 0;  // Bytes of a copy and of a slice that uses it.
};

TEST_F(TeacherMemoryTest, ACopyThatDoesNotFitIsRefusedByName) {
  StartWith(1);
  const int64_t copy = BytesIn("a copy of its weights takes ");
  StartWith(copy - 1);
  EXPECT_THAT(Distil("a", {.adapter_id = "t"}).get(),
              IsStatus(kExhausted,
                       "loss.teacher.adapter_id: adapter 't' is "
                       "not on the device"));
  // Other steps have the budget.
  EXPECT_THAT(Distil("a", {.base_model = true}).get(), IsOk());
}

TEST_F(TeacherMemoryTest, ABatchHasRoomForItsCopy) {
  batch_tokens_ = 2 * kNumTokens;
  StartWithRoomForOne();
  EXPECT_GT(alone_, copy_);
  EXPECT_LT(alone_, 2 * copy_);
  std::vector<std::future<absl::Status>> ends;
  for (int i = 0; i < 20; ++i) {
    ends.push_back(Distil("a", {.adapter_id = "s"}));
    ends.push_back(Distil("b", {.adapter_id = "t"}));
  }
  for (auto& end : ends) EXPECT_THAT(end.get(), IsOk());
}

TEST_F(TeacherMemoryTest, RequestsWithCopiesRunOneAfterAnother) {
  StartWithRoomForOne();
  std::vector<std::future<absl::Status>> ends;
  for (int i = 0; i < 3; ++i) {
    ends.push_back(Distil("a", {.adapter_id = "s"}, kMany));
    ends.push_back(Distil("b", {.adapter_id = "t"}, i == 1 ? kMany : 1));
    ends.push_back(Distil("b", {.base_model = true}));
  }
  for (auto& end : ends) EXPECT_THAT(end.get(), IsOk());
}

TEST_F(TeacherMemoryTest, ASliceWithoutATeacherHasTheWholeBudget) {
  StartWithRoomForOne();
  // So many tokens that a slice has no room beside the copy.
  int num_tokens = kNumTokens;
  StartWith(alone_ - copy_);
  while (Plain("b", 1, num_tokens).get().ok()) num_tokens += num_tokens / 2;
  // A new engine owes "b" a turn after the first slice of "a". What never fits
  // is refused, whoever runs.
  for (const bool fits : {true, false}) {
    StartWith(alone_);
    auto holder = Distil("a", {.adapter_id = "s"}, kMany);
    auto other = Plain("b", 2, fits ? num_tokens : 100 * num_tokens);
    EXPECT_THAT(holder.get(), IsOk());
    if (fits) {
      EXPECT_THAT(other.get(), IsOk());
    } else {
      EXPECT_THAT(other.get(), IsStatus(kExhausted, "needs "));
    }
  }
}

TEST_F(TeacherMemoryTest, TheNextOneRunsWhenTheHolderIsDeleted) {
  StartWithRoomForOne();
  auto holder = Distil("a", {.adapter_id = "s"}, 50 * kMany);
  auto waiter = Distil("b", {.adapter_id = "t"}, kMany);
  ASSERT_THAT(Wait<bool>([&](auto done) { engine_->DeleteAdapter("a", done); }),
              IsOk());
  EXPECT_THAT(holder.get(), IsStatus(absl::StatusCode::kNotFound, ""));
  EXPECT_THAT(waiter.get(), IsOk());
}

}  // namespace
}  // namespace weft::engine
