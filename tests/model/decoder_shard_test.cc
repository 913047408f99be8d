// Compares the decoder on several ranks with the decoder on one rank.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "src/lora/adapter_shard.h"
#include "src/model/decoder.h"
#include "src/model_config/model_shard.h"
#include "tests/model/decoder_fixture.h"
#include "tests/model/shard_weights.h"
#include "tests/support/ranks.h"

namespace weft::model {
namespace {

using ::weft::testing::Families;
using ::weft::testing::Family;
using ::weft::testing::MakeBatch;
using ::weft::testing::MakeDecoder;
using ::weft::testing::PathLength;
using ::weft::testing::ShardWeights;
using ::weft::testing::Train;
using ::weft::testing::TrainResult;
using ::weft::testing::UpstreamGradient;

Decoder ShardDecoder(const Decoder& whole, parallel::Communicator& group,
                     int expert_groups) {
  model_config::ModelConfig config = whole.config();
  config.moe.expert_groups = expert_groups;
  return {config, ShardWeights(whole.weights(), config, group.shard()),
          config.max_positions, &group};
}

lora::AdapterShard ShardAdapter(const Decoder& decoder,
                                const lora::AdapterVersion& whole,
                                const lora::AdapterLayout& local) {
  return {*whole.layout, local,
          model_config::LocalRanges(decoder.config(),
                                    decoder.tensor_group()->shard())};
}

// Returns the batch with the parts of its adapters that this rank holds.
PackedBatch ShardBatch(const Decoder& decoder, PackedBatch batch,
                       const std::vector<LoraConfig>& configs) {
  for (size_t i = 0; i < batch.routing.size(); ++i) {
    const lora::AdapterVersion& whole = *batch.routing[i].version;
    auto local = std::make_shared<lora::AdapterVersion>();
    local->layout = std::make_shared<lora::AdapterLayout>(
        decoder.local_config().shape(), configs[i]);
    local->compute_N =
        ShardAdapter(decoder, whole, *local->layout).Slice(whole.compute_N);
    batch.routing[i].version = local;
  }
  return batch;
}

// Runs one step on `size` ranks. They form `expert_groups` groups, each with a
// part of the experts. Returns the ranks' common result and the joined
// gradients of the adapters.
TrainResult TrainOnRanks(const Decoder& whole, const PackedBatch& batch,
                         const at::Tensor& dy_TH, int num_recomputed, int size,
                         int expert_groups = 1) {
  std::mutex mutex;
  TrainResult result;
  for (const lora::LoraSegment& segment : batch.routing) {
    result.gradients.push_back(at::zeros_like(segment.version->compute_N));
  }
  RunRanks(size, [&](parallel::Communicator& group) {
    const Decoder decoder = ShardDecoder(whole, group, expert_groups);
    const PackedBatch local =
        ShardBatch(decoder, batch, testing::BatchAdapters(whole.config()));
    const TrainResult own = Train(decoder, local, dy_TH, num_recomputed);
    const std::lock_guard lock(mutex);
    if (!result.x_TH.defined()) {
      result.x_TH = own.x_TH;
      result.y_TH = own.y_TH;
    }
    EXPECT_TRUE(at::equal(own.x_TH, result.x_TH));
    EXPECT_TRUE(at::equal(own.y_TH, result.y_TH));
    for (size_t i = 0; i < local.routing.size(); ++i) {
      ShardAdapter(decoder, *batch.routing[i].version,
                   *local.routing[i].version->layout)
          .AddTo(own.gradients[i], result.gradients[i]);
    }
  });
  return result;
}

void ExpectSame(const TrainResult& actual, const TrainResult& expected,
                const model_config::ModelConfig& config, double epsilon) {
  const int64_t path = PathLength(config);
  ExpectNear(actual.x_TH, expected.x_TH, epsilon, path, "x");
  ExpectNear(actual.y_TH, expected.y_TH, epsilon, path, "y");
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    // A gradient has the roundings of a forward and a backward pass.
    ExpectNear(actual.gradients[i], expected.gradients[i], epsilon, 2 * path,
               "gradient " + std::to_string(i));
  }
}

TEST(DecoderShardTest, RanksTrainAsOneDoes) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    for (const Family& family : Families()) {
      const Decoder whole = MakeDecoder(family, dtype);
      const PackedBatch batch = MakeBatch(whole);
      const at::Tensor dy_TH = UpstreamGradient(whole);
      const TrainResult expected =
          Train(whole, batch, dy_TH, /*num_recomputed=*/0);
      for (const int size : {2, 3, 4}) {
        SCOPED_TRACE(::testing::Message() << family.name << " on " << size);
        ExpectSame(
            TrainOnRanks(whole, batch, dy_TH, /*num_recomputed=*/0, size),
            expected, whole.config(),
            dtype == at::kDouble ? kEpsilonF64 : kEpsilonF32);
      }
    }
  }
}

TEST(DecoderShardTest, RanksWithExpertsOfTheirOwnTrainAsOneDoes) {
  for (const Family& family : Families()) {
    const Decoder whole = MakeDecoder(family, at::kDouble);
    if (whole.config().moe.shape.count == 0) continue;
    const PackedBatch batch = MakeBatch(whole);
    const at::Tensor dy_TH = UpstreamGradient(whole);
    const TrainResult expected = Train(whole, batch, dy_TH, 0);
    for (const auto& [size, expert_groups] :
         std::vector<std::pair<int, int>>{{2, 2}, {3, 3}, {4, 2}, {4, 4}}) {
      for (const int num_recomputed : {0, 1}) {
        SCOPED_TRACE(::testing::Message() << family.name << " on " << size
                                          << " in " << expert_groups);
        ExpectSame(TrainOnRanks(whole, batch, dy_TH, num_recomputed, size,
                                expert_groups),
                   expected, whole.config(), kEpsilonF64);
      }
    }
  }
}

TEST(DecoderShardTest, RecomputedLayersGiveTheSameBits) {
  for (const Family& family : Families()) {
    const Decoder whole = MakeDecoder(family, at::kFloat);
    const PackedBatch batch = MakeBatch(whole);
    const at::Tensor dy_TH = UpstreamGradient(whole);
    // With two ranks, a sum has the same bits in either order.
    const TrainResult kept = TrainOnRanks(whole, batch, dy_TH, 0, /*size=*/2);
    const TrainResult again = TrainOnRanks(whole, batch, dy_TH, 1, /*size=*/2);
    EXPECT_TRUE(at::equal(again.x_TH, kept.x_TH)) << family.name;
    for (size_t i = 0; i < kept.gradients.size(); ++i) {
      EXPECT_TRUE(at::equal(again.gradients[i], kept.gradients[i]))
          << family.name;
    }
  }
}

// Prefills a prompt and then decodes token by token. The pages hold only the
// rank's heads.
at::Tensor PrefillAndDecode(const Decoder& decoder, const PackedBatch& batch,
                            int64_t prompt) {
  constexpr int64_t kSlots = 4;
  const model_config::ModelConfig& local = decoder.local_config();
  const int64_t length = batch.tokens_T.numel();
  const int64_t num_pages = (length + kSlots - 1) / kSlots;
  KvStore store;
  for (int layer = 0; layer < local.num_layers; ++layer) {
    for (auto* pages : {&store.k_pages_PSKC, &store.v_pages_PSKC}) {
      pages->push_back(
          at::zeros({num_pages, kSlots, local.num_kv_heads, local.head_dim},
                    decoder.dtype()));
    }
  }
  std::vector<at::Tensor> rows;
  for (int64_t done = 0; done < length;) {
    const int64_t count = done == 0 ? prompt : 1;
    PackedBatch part{
        .tokens_T = batch.tokens_T.narrow(0, done, count),
        .positions_T = batch.positions_T.narrow(0, done, count),
        .nodes = {{.begin = 0, .end = count, .subtree_end = count}},
        .routing = batch.routing};
    part.routing[0].end = count;
    KvAccess kv{.store = &store,
                .slots_T = at::arange(done, done + count, at::kLong),
                .decode = done > 0,
                .page_table_TL = at::arange(num_pages, at::kInt).unsqueeze(0),
                .lengths_T = at::full({1}, done + count, at::kInt)};
    rows.push_back(decoder.ForwardLayers(Mode::kEval, part, /*tape=*/nullptr,
                                         /*num_recomputed=*/0, &kv));
    done += count;
  }
  return at::cat(rows);
}

TEST(DecoderShardTest, RanksDecodeOverPagesOfTheirOwnHeads) {
  for (const Family& family : Families()) {
    const Decoder whole = MakeDecoder(family, at::kFloat);
    PackedBatch batch{
        .tokens_T = at::randint(whole.config().vocab, {11}, at::kLong),
        .positions_T = at::arange(11, at::kInt),
        .nodes = {{.begin = 0, .end = 11, .subtree_end = 11}}};
    batch.routing = {MakeBatch(whole).routing[0]};
    batch.routing[0].end = 11;
    const at::Tensor expected =
        whole.ForwardLayers(Mode::kEval, batch, /*tape=*/nullptr,
                            /*num_recomputed=*/0, /*kv=*/nullptr);
    for (const int size : {2, 4}) {
      const int expert_groups = whole.config().moe.shape.count > 0 ? 2 : 1;
      RunRanks(size, [&](parallel::Communicator& group) {
        const Decoder decoder = ShardDecoder(whole, group, expert_groups);
        const PackedBatch local =
            ShardBatch(decoder, batch, testing::BatchAdapters(whole.config()));
        ExpectNear(PrefillAndDecode(decoder, local, /*prompt=*/6), expected,
                   kEpsilonF32, PathLength(whole.config()),
                   family.name + " on " + std::to_string(size));
      });
    }
  }
}

}  // namespace
}  // namespace weft::model
