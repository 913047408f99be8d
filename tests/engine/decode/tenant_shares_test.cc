// Tests that no tenant keeps the samples of another one from their share of the
// decode loop, and that sharing changes no result.
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "src/engine/decode/sample_loop.h"
#include "tests/engine/decode/sample_loop_fixture.h"

namespace weft::engine {
namespace {

class TenantSharesTest : public SampleLoopTest {
 protected:
  // Runs steps until the request ends. Returns how many, and keeps the result.
  int StepsUntilEnd(uint64_t id) {
    for (int step = 1; step < 5000; ++step) {
      StepInto(results_);
      if (results_.contains(id)) return step;
    }
    ADD_FAILURE() << "the request does not end";
    return 0;
  }

  std::map<uint64_t, SampleResult> results_;
};

TEST_F(TenantSharesTest, AFullLoopHasASlotForAnotherTenant) {
  SampleRequest group = Request(1, 20, 60, 7);
  group.num_samples = 16;
  const SampleRequest one = Request(9, 5, 1, 8);
  const SampleResult expected_group = Alone(group);
  const SampleResult expected_one = Alone(one);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, 200),
           .max_decode_sequences = 4});
  AdmitFor("alice", 1, group);
  for (int step = 0; step < 5; ++step) (void)loop_->Step();
  EXPECT_FALSE(loop_->HasRoom(one, "alice"));
  ASSERT_TRUE(loop_->HasRoom(one, "bob"));
  AdmitFor("bob", 2, one);
  EXPECT_EQ(StepsUntilEnd(2), 1);
  StepsUntilEnd(1);
  ExpectSameDraws(results_[2], expected_one);
  ExpectSameDraws(results_[1], expected_group);
}

TEST_F(TenantSharesTest, RunningSamplesAreCappedAtTheShareOfTheirTenant) {
  SampleRequest group = Request(1, 5, 90, 7);
  group.num_samples = 16;
  const SampleResult expected = Alone(group);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, 200),
           .max_decode_sequences = 8,
           .tenant_weights = {{"alice", 3}}});
  loop_->Admit({.id = 1,
                .flow = Key("alice"),
                .tenant = "alice",
                .request = &group,
                .streams = true},
               /*version=*/nullptr);
  for (int step = 0; step < 20; ++step) (void)loop_->Step();
  AdmitFor("bob", 2, group);
  (void)loop_->Step();
  for (const SampleEvent& event : loop_->Step()) {
    ASSERT_EQ(event.work_id, 1u);  // That of bob does not stream.
    EXPECT_EQ(event.deltas.size(), 6u);
  }
  StepsUntilEnd(1);
  StepsUntilEnd(2);
  ExpectSameDraws(results_[1], expected);
  ExpectSameDraws(results_[2], expected);
}

TEST_F(TenantSharesTest, FullPagesAreYieldedToAnotherTenant) {
  SampleRequest group = Request(1, 4, 120, 7);
  group.num_samples = 5;
  const SampleRequest one = Request(9, 30, 2, 8);
  const SampleResult expected_group = Alone(group);
  const SampleResult expected_one = Alone(one);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, 9)});
  AdmitFor("alice", 1, group);
  for (int step = 0; step < 40; ++step) (void)loop_->Step();
  ASSERT_EQ(Metric("weft_kv_cache_used_bytes"), BytesOfPages(decoder_, 9));
  ASSERT_TRUE(loop_->HasRoom(one, "bob"));
  AdmitFor("bob", 2, one);
  EXPECT_EQ(StepsUntilEnd(2), 2);
  StepsUntilEnd(1);
  ExpectSameDraws(results_[2], expected_one);
  ExpectSameDraws(results_[1], expected_group);
  EXPECT_TRUE(AllPagesFree(9));
}

TEST_F(TenantSharesTest, LongPromptsDoNotDelayAShortOne) {
  const SampleRequest longs[] = {Request(1, 60, 2, 7), Request(2, 60, 2, 7)};
  const SampleRequest one = Request(9, 5, 1, 8);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_prefill_tokens = 6});
  AdmitFor("alice", 1, longs[0]);
  AdmitFor("alice", 2, longs[1]);
  (void)loop_->Step();
  AdmitFor("bob", 3, one);
  EXPECT_LE(StepsUntilEnd(3), 2);
}

TEST_F(TenantSharesTest, DrawsAtEachPositionOfAPromptDoNotDelayAShortOne) {
  SampleRequest listed = Request(1, 60, 1, 7);
  listed.prompt_alternatives = 8;
  SampleRequest top = Request(2, 60, 1, 7);
  top.prompt_top_logprobs = 3;
  const SampleRequest one = Request(9, 5, 1, 8);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 4});
  AdmitFor("alice", 1, listed);
  AdmitFor("alice", 2, top);
  (void)loop_->Step();
  AdmitFor("bob", 3, one);
  EXPECT_LE(StepsUntilEnd(3), 2);
}

TEST_F(TenantSharesTest, APassFullOfDrawsCountsAsAPass) {
  const SampleRequest first = Request(2, 40, 1, 7);
  SampleRequest listed = Request(1, 60, 1, 7);
  listed.prompt_alternatives = 8;
  const SampleRequest one = Request(9, 5, 1, 8);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 8,
           .max_prefill_tokens = 40});
  AdmitFor("bob", 1, first);
  StepsUntilEnd(1);
  AdmitFor("alice", 2, listed);
  AdmitFor("bob", 3, one);
  // Alice has used nothing yet, and draws all of a pass at one position.
  EXPECT_LE(StepsUntilEnd(3), 4);
  EXPECT_FALSE(results_.contains(2));
}

TEST_F(TenantSharesTest, SmallPromptsDoNotOvertakeALargeOneOfTheirTenant) {
  SampleRequest large = Request(1, 90, 1, 7);
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_decode_sequences = 64,
           .max_prefill_tokens = 10});
  AdmitFor("alice", 1, large);
  uint64_t next = 2;
  std::deque<SampleRequest> small;
  for (int step = 0; !results_.contains(1); ++step) {
    ASSERT_LT(step, 60) << "others overtake it for ever";
    for (const char* const tenant : {"alice", "bob"}) {
      small.push_back(Request(static_cast<int32_t>(next % 50), 4, 1, next));
      if (!loop_->HasRoom(small.back(), tenant)) continue;
      AdmitFor(tenant, next++, small.back());
    }
    StepInto(results_);
  }
}

TEST_F(TenantSharesTest, TwoTenantsPrefillInTurns) {
  const SampleRequest prompts[] = {Request(1, 60, 1, 7), Request(2, 60, 1, 7),
                                   Request(3, 60, 1, 7)};
  Restart({.kv_cache_bytes = BytesOfPages(decoder_, kPages),
           .max_prefill_tokens = 6});
  AdmitFor("alice", 1, prompts[0]);
  AdmitFor("alice", 2, prompts[1]);
  AdmitFor("bob", 3, prompts[2]);
  EXPECT_LE(StepsUntilEnd(3), 21);
  EXPECT_FALSE(results_.contains(2));
}

TEST_F(TenantSharesTest, EveryRequestEndsWithItsOwnResult) {
  std::mt19937 random(5);
  const std::string tenants[] = {"alice", "bob", "carol"};
  std::vector<SampleRequest> requests;
  std::vector<SampleResult> expected;
  for (int i = 0; i < 12; ++i) {
    requests.push_back(Request(static_cast<int32_t>(random() % 3),
                               1 + static_cast<int>(random() % 70),
                               1 + static_cast<int>(random() % 60), random()));
    requests.back().num_samples = 1 + static_cast<int>(random() % 4);
    requests.back().prompt_logprobs = random() % 4 == 0;
    expected.push_back(Alone(requests[i]));
  }
  for (int round = 0; round < 6; ++round) {
    Restart({.kv_cache_bytes = BytesOfPages(decoder_, 10),
             .max_decode_sequences = 1 + round,
             .tenant_weights = {{"bob", 1 + round}},
             .max_prefill_tokens = static_cast<int64_t>(1 + random() % 40)});
    results_.clear();
    uint64_t next = 0;
    for (int step = 0; results_.size() < 12; ++step) {
      ASSERT_LT(step, 5000) << "the loop does not end";
      const std::string& tenant = tenants[random() % 3];
      if (next < 12 && random() % 3 == 0 &&
          loop_->HasRoom(requests[next], tenant)) {
        AdmitFor(tenant, next, requests[next]);
        ++next;
      }
      StepInto(results_);
    }
    for (const auto& [id, result] : results_) {
      SCOPED_TRACE(id);
      ExpectSameDraws(result, expected[id]);
      ExpectSameScores(result.prompt_logprobs, expected[id].prompt_logprobs);
    }
    EXPECT_TRUE(AllPagesFree(10));
  }
}

}  // namespace
}  // namespace weft::engine
