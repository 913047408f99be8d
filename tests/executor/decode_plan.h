// Makes decode steps for tests, over a cache that is full of random numbers.
// Also compares caches.
#ifndef WEFT_TESTS_EXECUTOR_DECODE_PLAN_H_
#define WEFT_TESTS_EXECUTOR_DECODE_PLAN_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "src/executor/model_runner.h"
#include "src/executor/plan.h"
#include "src/model/decoder.h"
#include "src/request/cache_copy.h"

namespace weft::executor {

inline constexpr int64_t kPageTokens = 16;
inline constexpr int64_t kPages = 40;
inline constexpr int64_t kPagesOfSequence = 3;
inline constexpr int64_t kStates = 1 + kPages / kPagesOfSequence;

inline model::KvStore FilledCache(const model::Decoder& decoder) {
  model::KvStore store = AllocateCache(
      decoder, kPages, kPageTokens, decoder.config().has_delta() ? kStates : 0);
  at::manual_seed(11);
  for (auto* parts : {&store.k_pages_PSKC, &store.v_pages_PSKC, &store.conv_NRW,
                      &store.delta_NHKV}) {
    for (at::Tensor& layer : *parts) {
      if (layer.defined()) layer.copy_(at::randn(layer.sizes(), at::kFloat));
    }
  }
  return store;
}

// Makes one step of `num_rows` sequences, whose lengths and tokens differ with
// `salt`. `num_rows` is at most kPages / kPagesOfSequence.
inline CachePlan DecodePlan(int64_t num_rows, int64_t salt,
                            const model_config::ModelConfig& config) {
  const at::Tensor row = at::arange(num_rows);
  const at::Tensor length = (row * 7 + salt * 5).remainder(40) + 1;
  CachePlan plan;
  plan.batch.tokens_T = (row * 5 + salt).remainder(config.vocab);
  plan.batch.positions_T = (length - 1).to(at::kInt);
  plan.kv = {.slots_T = row * (kPagesOfSequence * kPageTokens) + length - 1,
             .decode = true,
             .page_table_TL = (row.unsqueeze(1) * kPagesOfSequence +
                               at::arange(kPagesOfSequence))
                                  .to(at::kInt),
             .lengths_T = length.to(at::kInt)};
  // The states are in another order than the rows.
  if (config.has_delta()) plan.kv.state_slots_Q = at::arange(num_rows, 0, -1);
  for (int64_t r = 0; r < num_rows; ++r) {
    plan.logit_rows.push_back(r);
    plan.draws.push_back({.seed = static_cast<uint64_t>(salt),
                          .position = static_cast<uint32_t>(r),
                          .row = static_cast<int32_t>(r)});
  }
  return plan;
}

// Compares all pages, and all states except that of padding.
inline void ExpectSameCache(const model::KvStore& one,
                            const model::KvStore& other) {
  const auto compare = [&](std::vector<at::Tensor> model::KvStore::*part,
                           int64_t first) {
    for (size_t layer = 0; layer < (one.*part).size(); ++layer) {
      const at::Tensor& expected = (one.*part)[layer];
      if (!expected.defined()) continue;
      EXPECT_TRUE(
          expected.slice(0, first).equal((other.*part)[layer].slice(0, first)))
          << "layer " << layer;
    }
  };
  compare(&model::KvStore::k_pages_PSKC, 0);
  compare(&model::KvStore::v_pages_PSKC, 0);
  compare(&model::KvStore::conv_NRW, kPaddingState + 1);
  compare(&model::KvStore::delta_NHKV, kPaddingState + 1);
}

}  // namespace weft::executor

#endif  // WEFT_TESTS_EXECUTOR_DECODE_PLAN_H_
