#include "src/executor/message.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/model/tiny_model.h"

namespace weft::executor {
namespace {

class MessageTest : public ::testing::Test {
 protected:
  MessageTest()
      : version_(TinyVersion(TinyConfig(), {.rank = 2}, at::kFloat)) {}

  // Returns the message as another rank reads it.
  template <typename T>
  T Send(const T& message) const {
    return std::get<T>(Decode(Encode(message), [this](uint64_t id) {
      EXPECT_EQ(id, version_->id.value());
      return version_;
    }));
  }

  lora::LoraRouting Routing() const {
    return {{.begin = 0, .end = 2, .version = version_},
            {.begin = 2, .end = 3, .version = version_}};
  }

  void ExpectRouting(const lora::LoraRouting& routing) const {
    ASSERT_EQ(routing.size(), 2);
    EXPECT_EQ(routing[0].end, 2);
    EXPECT_EQ(routing[1].begin, 2);
    EXPECT_EQ(routing[1].version, version_);
  }

  const lora::AdapterVersionPtr version_;
};

TEST_F(MessageTest, ATrainPlanArrivesWhole) {
  TrainPlan plan{
      .batch = {.tokens_T = at::tensor({5L, 6L, 7L}),
                .positions_T = at::tensor({0, 1, 2}, at::kInt),
                .nodes = {{.begin = 0, .end = 3, .subtree_end = 3}},
                .routing = Routing(),
                .experts_TE = at::tensor({3, -1, 2}, at::kShort)},
      .score_index_R = at::tensor({1L, 2L}),
      .rows = {.row_offsets = {0, 1, 3},
               .targets = {4, 5, 6},
               .temperatures = {1.0f, 0.5f},
               .filters = {0.0f, 0.25f},
               .supports = {.rows = {1}, .offsets = {0, 2}, .ids = {5, 6}},
               .routing = Routing()},
      .distill = {.batch = {.tokens_T = at::tensor({8L}), .routing = Routing()},
                  .teacher_index_D = at::tensor({3L}),
                  .student_index_D = at::tensor({2L}),
                  .rows = {.scores = {.targets = {7}, .routing = Routing()},
                           .teacher_routing = Routing(),
                           .divergences = {{.function = LossFunction::kJs,
                                            .beta = 0.25}}}},
      .backward = true,
      .wants_entropy = true,
      .wants_routing = true,
      .num_recomputed = 3};
  const TrainCommand command = Send(TrainCommand{.plans = {plan, TrainPlan()}});
  ASSERT_EQ(command.plans.size(), 2);
  const TrainPlan& got = command.plans.front();
  EXPECT_TRUE(at::equal(got.batch.tokens_T, plan.batch.tokens_T));
  EXPECT_TRUE(at::equal(got.batch.positions_T, plan.batch.positions_T));
  EXPECT_EQ(got.batch.positions_T.scalar_type(), at::kInt);
  EXPECT_EQ(got.batch.nodes.at(0).end, 3);
  EXPECT_EQ(got.batch.nodes.at(0).parent, -1);
  ExpectRouting(got.batch.routing);
  EXPECT_TRUE(at::equal(got.batch.experts_TE, plan.batch.experts_TE));
  EXPECT_TRUE(at::equal(got.score_index_R, plan.score_index_R));
  EXPECT_EQ(got.rows.row_offsets, plan.rows.row_offsets);
  EXPECT_EQ(got.rows.targets, plan.rows.targets);
  EXPECT_EQ(got.rows.temperatures, plan.rows.temperatures);
  EXPECT_EQ(got.rows.filters, plan.rows.filters);
  EXPECT_EQ(got.rows.supports.rows, plan.rows.supports.rows);
  EXPECT_EQ(got.rows.supports.offsets, plan.rows.supports.offsets);
  EXPECT_EQ(got.rows.supports.ids, plan.rows.supports.ids);
  ExpectRouting(got.rows.routing);
  const DistillPlan& distill = got.distill;
  EXPECT_TRUE(at::equal(distill.batch.tokens_T, at::tensor({8L})));
  ExpectRouting(distill.batch.routing);
  EXPECT_TRUE(at::equal(distill.teacher_index_D, at::tensor({3L})));
  EXPECT_TRUE(at::equal(distill.student_index_D, at::tensor({2L})));
  EXPECT_EQ(distill.rows.scores.targets, plan.distill.rows.scores.targets);
  ExpectRouting(distill.rows.scores.routing);
  ExpectRouting(distill.rows.teacher_routing);
  EXPECT_EQ(distill.rows.divergences, plan.distill.rows.divergences);
  EXPECT_TRUE(got.backward);
  EXPECT_TRUE(got.wants_entropy);
  EXPECT_TRUE(got.wants_routing);
  EXPECT_EQ(got.num_recomputed, 3);
  EXPECT_FALSE(command.plans.back().batch.tokens_T.defined());
  EXPECT_TRUE(command.plans.back().distill.empty());
}

TEST_F(MessageTest, ACachePlanArrivesWhole) {
  CachePlan plan{
      .batch = {.tokens_T = at::tensor({5L}), .routing = Routing()},
      .kv =
          {.slots_T = at::tensor({9L}),
           .suffixes = {{.q_begin = 0, .q_size = 1, .k_begin = 2, .k_size = 3}},
           .key_slots_S = at::tensor({1L, 2L}),
           .decode = true,
           .page_table_TL = at::ones({1, 2}, at::kInt),
           .lengths_T = at::tensor({4}, at::kInt),
           .state_slots_Q = at::tensor({6L})},
      .logit_rows = {0},
      .logit_routing = Routing(),
      .draws =
          {{.config = {.top_p = 0.25}, .seed = 6, .position = 7, .row = 8}},
      .score_rows = {1, 2},
      .scores = {.row_offsets = {0}, .targets = {3}}};
  const CachePlan got = Send(CacheCommand{.plan = plan}).plan;
  EXPECT_TRUE(at::equal(got.kv.slots_T, plan.kv.slots_T));
  EXPECT_EQ(got.kv.suffixes.at(0).k_size, 3);
  EXPECT_TRUE(at::equal(got.kv.key_slots_S, plan.kv.key_slots_S));
  EXPECT_TRUE(got.kv.decode);
  EXPECT_TRUE(at::equal(got.kv.page_table_TL, plan.kv.page_table_TL));
  EXPECT_TRUE(at::equal(got.kv.lengths_T, plan.kv.lengths_T));
  EXPECT_TRUE(at::equal(got.kv.state_slots_Q, plan.kv.state_slots_Q));
  EXPECT_EQ(got.logit_rows, plan.logit_rows);
  ExpectRouting(got.logit_routing);
  ASSERT_EQ(got.draws.size(), 1);
  EXPECT_EQ(got.draws[0].config.top_p, 0.25);
  EXPECT_EQ(got.draws[0].seed, 6);
  EXPECT_EQ(got.draws[0].position, 7);
  EXPECT_EQ(got.draws[0].row, 8);
  EXPECT_EQ(got.score_rows, plan.score_rows);
  EXPECT_EQ(got.scores.targets, plan.scores.targets);
}

TEST_F(MessageTest, TheOthersArriveToo) {
  const LoraConfig config{
      .rank = 3,
      .alpha = 5,
      .target_modules = {TargetModule::kOProj, TargetModule::kLmHead},
      .seed = 9,
      .overrides = {{.layer = 1,
                     .module = TargetModule::kOProj,
                     .shape = {.rank = 2, .alpha = 7}}}};
  const NewVersion version = Send(NewVersion{.id = 12, .config = config});
  EXPECT_EQ(version.id, 12);
  EXPECT_EQ(version.config, config);
  EXPECT_EQ(Send(DropVersions{.ids = {3, 4}}).ids,
            std::vector<uint64_t>({3, 4}));
  const CacheSize size =
      Send(CacheSize{.num_pages = 8, .page_tokens = 16, .num_states = 5});
  EXPECT_EQ(size.num_pages, 8);
  EXPECT_EQ(size.page_tokens, 16);
  EXPECT_EQ(size.num_states, 5);
  for (const CacheCopy& copy :
       {CacheCopy(PageCopy{.from = 1, .to = 2, .num_rows = 3}),
        CacheCopy(StateCopy{.from = 1, .to = 2}),
        CacheCopy(StateCopy{.to = 3})}) {
    EXPECT_EQ(Send(copy), copy);
  }
  const GradientsCommand gradients =
      Send(GradientsCommand{.gradients_E = {at::tensor({1.5f}), at::Tensor()},
                            .trained = {{7, 8}, {}}});
  ASSERT_EQ(gradients.gradients_E.size(), 2);
  EXPECT_TRUE(at::equal(gradients.gradients_E[0], at::tensor({1.5f})));
  EXPECT_FALSE(gradients.gradients_E[1].defined());
  EXPECT_EQ(gradients.trained,
            (std::vector<std::vector<uint64_t>>{{7, 8}, {}}));
  Send(StopCommand());
}

TEST_F(MessageTest, WhatIsCutShortThrows) {
  const std::string bytes = Encode(DropVersions{.ids = {3, 4}});
  const FindVersion none = [](uint64_t) { return nullptr; };
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(static_cast<void>(Decode(bytes.substr(0, size), none)),
                 c10::Error);
  }
  EXPECT_THROW(static_cast<void>(Decode(std::string(8, '\x7f'), none)),
               c10::Error);
}

}  // namespace
}  // namespace weft::executor
