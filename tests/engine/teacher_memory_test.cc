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

namespace weft {
namespace {

using ::weft::testing::Wait;
// So large that a copy takes more than the rest of a small batch.
constexpr int kRank = 8192;
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

  std::future<absl::Status> Distil(const std::string& student,
                                   const Teacher& teacher) {
    TrainRequest request{.adapter_id = student};
    request.data = {{.tokens = {1, 2, 3}, .targets = {2, 3, 4}}};
    request.loss.function = LossFunction::kForwardKl;
    request.loss.teacher = teacher;
    const auto promise = std::make_shared<std::promise<absl::Status>>();
    engine_->Train(request, [promise](const auto& reply) {
      promise->set_value(reply.status());
    });
    return promise->get_future();
  }

  // Returns the number behind `word` in the error of a distillation.
  int64_t BytesIn(const std::string& word) {
    const absl::Status status = Distil("a", {.adapter_id = "t"}).get();
    EXPECT_THAT(status, IsStatus(kExhausted, word));
    const std::string text(status.message());
    return std::stoll(text.substr(text.find(word) + word.size()));
  }
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

TEST_F(TeacherMemoryTest, ABatchWithTwoCopiesRunsInParts) {
  StartWith(1);
  const int64_t copy = BytesIn("a copy of its weights takes ");
  StartWith(copy);
  // The copy has its room now, and the batch has none.
  const int64_t alone = BytesIn("needs ");
  EXPECT_GT(alone, copy);
  EXPECT_LT(alone, 2 * copy);
  StartWith(alone);
  std::vector<std::future<absl::Status>> ends;
  for (int i = 0; i < 20; ++i) {
    ends.push_back(Distil("a", {.adapter_id = "s"}));
    ends.push_back(Distil("b", {.adapter_id = "t"}));
  }
  for (auto& end : ends) EXPECT_THAT(end.get(), IsOk());
}

}  // namespace
}  // namespace weft
