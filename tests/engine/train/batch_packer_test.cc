#include "src/engine/train/batch_packer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::engine::batch_packer_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Makes a datum with one target per token, all scored. Token t should be
// followed by t + 100.
Datum Tokens(std::vector<int32_t> tokens) {
  Datum datum{.tokens = std::move(tokens)};
  for (const int32_t token : datum.tokens) {
    datum.targets.push_back(token + 100);
  }
  return datum;
}

TrainRequest Request(std::vector<Datum> data, double temperature = 1) {
  return {.loss = {.temperature = temperature}, .data = std::move(data)};
}

lora::AdapterVersionPtr Version() {
  return std::make_shared<lora::AdapterVersion>();
}

TrainPiece Whole(const TrainRequest& request, lora::AdapterVersionPtr version) {
  return {.request = &request,
          .num_data = static_cast<int64_t>(request.data.size()),
          .version = std::move(version)};
}

PackedTrain Pack(const std::vector<TrainPiece>& pieces) {
  return PackTrain(pieces, /*share_prompts=*/false);
}

template <typename T>
std::vector<T> Values(const at::Tensor& tensor) {
  const T* data = tensor.const_data_ptr<T>();
  return {data, data + tensor.numel()};
}

using Node = std::tuple<int64_t, int64_t, int64_t, int64_t>;
std::vector<Node> NodesOf(const PackedTrain& packed) {
  std::vector<Node> nodes;
  for (const ops::AttentionNode& node : packed.batch.nodes) {
    nodes.emplace_back(node.begin, node.end, node.parent, node.subtree_end);
  }
  return nodes;
}

using Segment = std::tuple<int64_t, int64_t, const lora::AdapterVersion*>;
std::vector<Segment> SegmentsOf(const PackedTrain& packed) {
  std::vector<Segment> segments;
  for (const lora::LoraSegment& segment : packed.batch.routing) {
    segments.emplace_back(segment.begin, segment.end, segment.version.get());
  }
  return segments;
}

// This is the worked example of packed_batch.h.
TEST(PackTrainTest, LaysSequencesFlatWithoutPadding) {
  const TrainRequest seven = Request({Tokens({1, 2, 3}), Tokens({4, 5})});
  const TrainRequest nine = Request({Tokens({6, 7})});
  const lora::AdapterVersionPtr a = Version(), b = Version();
  const PackedTrain packed = Pack({Whole(seven, a), Whole(nine, b)});
  EXPECT_EQ(packed.batch.tokens_T.scalar_type(), at::kLong);
  EXPECT_EQ(packed.batch.positions_T.scalar_type(), at::kInt);
  EXPECT_THAT(Values<int64_t>(packed.batch.tokens_T),
              ElementsAre(1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(Values<int32_t>(packed.batch.positions_T),
              ElementsAre(0, 1, 2, 0, 1, 0, 1));
  EXPECT_THAT(NodesOf(packed), ElementsAre(Node(0, 3, -1, 3), Node(3, 5, -1, 5),
                                           Node(5, 7, -1, 7)));
  EXPECT_THAT(SegmentsOf(packed),
              ElementsAre(Segment(0, 5, a.get()), Segment(5, 7, b.get())));
}

TEST(PackTrainTest, MergesNeighbouringPiecesOfOneVersion) {
  const TrainRequest first = Request({Tokens({1, 2})});
  const TrainRequest second = Request({Tokens({3}), Tokens({4})});
  const lora::AdapterVersionPtr version = Version();
  EXPECT_THAT(SegmentsOf(Pack({Whole(first, version), Whole(second, version)})),
              ElementsAre(Segment(0, 4, version.get())));
}

TEST(PackTrainTest, KeepsVersionsOfOneAdapterApart) {
  const TrainRequest request = Request({Tokens({1, 2})});
  const lora::AdapterVersionPtr older = Version(), newer = Version();
  EXPECT_THAT(
      SegmentsOf(Pack({Whole(request, older), Whole(request, newer)})),
      ElementsAre(Segment(0, 2, older.get()), Segment(2, 4, newer.get())));
}

TEST(PackTrainTest, LeavesRowsOfTheBaseModelOutOfTheRouting) {
  const TrainRequest request = Request({Tokens({1, 2})});
  const lora::AdapterVersionPtr version = Version();
  EXPECT_THAT(SegmentsOf(Pack({Whole(request, nullptr)})), IsEmpty());
  // The base model's rows lie between two segments of one adapter. These
  // segments must not merge.
  EXPECT_THAT(
      SegmentsOf(Pack({Whole(request, version), Whole(request, nullptr),
                       Whole(request, version)})),
      ElementsAre(Segment(0, 2, version.get()), Segment(4, 6, version.get())));
}

TEST(PackTrainTest, TakesOnlyTheDataOfTheSlice) {
  const TrainRequest request =
      Request({Tokens({1, 2}), Tokens({3}), Tokens({4, 5, 6}), Tokens({7, 8})});
  const PackedTrain packed =
      Pack({{.request = &request, .first_datum = 1, .num_data = 2}});
  EXPECT_THAT(Values<int64_t>(packed.batch.tokens_T), ElementsAre(3, 4, 5, 6));
  ASSERT_EQ(packed.data.size(), 2u);
  EXPECT_EQ(packed.data[0].datum, &request.data[1]);
  EXPECT_EQ(packed.data[1].datum, &request.data[2]);
  EXPECT_EQ(packed.data[1].request, &request);
}

TEST(PackTrainTest, ScoresEveryTokenWhenThereAreNoWeights) {
  const TrainRequest request = Request({Tokens({1, 2}), Tokens({3})});
  const PackedTrain packed = Pack({Whole(request, nullptr)});
  EXPECT_THAT(packed.rows.targets, ElementsAre(101, 102, 103));
  EXPECT_THAT(packed.rows.row_offsets, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Values<int64_t>(packed.score_index_R), ElementsAre(0, 1, 2));
}

TEST(PackTrainTest, ScoresOnlyTokensWhoseWeightIsNotZero) {
  Datum datum = Tokens({1, 2, 3, 4});
  datum.weights = {0, 0.5F, 0, -1};
  const TrainRequest request = Request({Tokens({9}), datum});
  const PackedTrain packed = Pack({Whole(request, nullptr)});
  EXPECT_THAT(packed.rows.targets, ElementsAre(109, 102, 104));
  EXPECT_THAT(packed.rows.row_offsets, ElementsAre(0, 1, 2, 3));
  // score_index_R has rows of the batch, not of the datum.
  EXPECT_THAT(Values<int64_t>(packed.score_index_R), ElementsAre(0, 2, 4));
}

TEST(PackTrainTest, GivesARowOneEntryForEachScoredTarget) {
  const Datum datum{.tokens = {1, 2, 3},
                    .targets = {10, 11, 12, 20, 21, 22, 30, 31, 32},
                    .weights = {1, 0, 1, 0, 0, 0, 0, 0.25F, 0},
                    .targets_per_token = 3};
  const TrainRequest request = Request({datum});
  const PackedTrain packed = Pack({Whole(request, nullptr)});
  EXPECT_THAT(packed.rows.targets, ElementsAre(10, 12, 31));
  EXPECT_THAT(packed.rows.row_offsets, ElementsAre(0, 2, 3));
  EXPECT_THAT(Values<int64_t>(packed.score_index_R), ElementsAre(0, 2));
  EXPECT_TRUE(IsScored({}, datum, 0));
  EXPECT_FALSE(IsScored({}, datum, 1));
  EXPECT_TRUE(IsScored({.score_all = true}, datum, 1));
  EXPECT_TRUE(IsScored({}, datum, 7));
}

TEST(PackTrainTest, TakesAsManyTargetsAsATokenHas) {
  // The tokens have 2, 0, 3 and 1 targets. Two targets have weight 0.
  const Datum datum{.tokens = {1, 2, 3, 4},
                    .targets = {10, 11, 30, 31, 32, 40},
                    .weights = {1, 1, 1, 0, 1, 0},
                    .target_offsets = {0, 2, 2, 5, 6}};
  const TrainRequest request = Request({Tokens({9}), datum});
  const PackedTrain packed = Pack({Whole(request, nullptr)});
  EXPECT_THAT(packed.rows.targets, ElementsAre(109, 10, 11, 30, 32));
  EXPECT_THAT(packed.rows.row_offsets, ElementsAre(0, 1, 3, 5));
  EXPECT_THAT(Values<int64_t>(packed.score_index_R), ElementsAre(0, 1, 3));
  EXPECT_THAT(packed.data[1].rows, ElementsAre(1, 2));
  EXPECT_THAT(packed.data[1].entries, ElementsAre(1, 2, 3, 4));
}

TEST(PackTrainTest, TellsWhereTheResultsOfEachDatumLie) {
  const Datum soft{.tokens = {1, 2},
                   .targets = {10, 11, 20, 21},
                   .weights = {1, 1, 0, 1},
                   .targets_per_token = 2};
  Datum silent = Tokens({5, 6});
  silent.weights = {0, 0};
  const TrainRequest first = Request({soft, silent});
  const TrainRequest second = Request({Tokens({7, 8})});
  const PackedTrain packed =
      Pack({Whole(first, nullptr), Whole(second, nullptr)});
  ASSERT_EQ(packed.data.size(), 3U);
  EXPECT_THAT(packed.data[0].rows, ElementsAre(0, 1));
  EXPECT_THAT(packed.data[0].entries, ElementsAre(0, 1, 2));
  EXPECT_THAT(packed.data[1].rows, IsEmpty());
  EXPECT_THAT(packed.data[1].entries, IsEmpty());
  EXPECT_THAT(packed.data[2].rows, ElementsAre(2, 3));
  EXPECT_THAT(packed.data[2].entries, ElementsAre(3, 4));
  EXPECT_THAT(packed.rows.targets, ElementsAre(10, 11, 21, 107, 108));
}

TEST(PackTrainTest, GivesEveryRowTheTemperatureOfItsRequest) {
  const TrainRequest warm = Request({Tokens({1, 2})}, 2);
  const TrainRequest cold = Request({Tokens({3})}, 0.5);
  const PackedTrain packed = Pack({Whole(warm, nullptr), Whole(cold, nullptr)});
  EXPECT_THAT(packed.rows.temperatures, ElementsAre(2.0F, 2.0F, 0.5F));
}

// Both data score the same row, with equal supports, with other ones, and with
// none. Only targets without a support share the score row.
TEST(PackTrainTest, ATargetWithASupportHasAScoreRowOfItsOwn) {
  std::vector<Datum> data(4, Tokens(std::vector<int32_t>(20, 7)));
  for (Datum& datum : data) {
    datum.weights.assign(20, 0);
    datum.weights[18] = datum.weights[19] = 1;
  }
  data[1].support.offsets.assign(21, 0);
  data[1].support.offsets[20] = 2;
  data[1].support.tokens = {3, 107};
  data[3].support = data[1].support;
  const TrainRequest request = Request(std::move(data));
  const PackedTrain packed =
      PackTrain({Whole(request, nullptr)}, /*share_prompts=*/true);
  EXPECT_EQ(packed.batch.tokens_T.size(0), 20);
  EXPECT_THAT(Values<int64_t>(packed.score_index_R),
              ElementsAre(18, 19, 19, 19));
  EXPECT_THAT(packed.rows.row_offsets, ElementsAre(0, 4, 6, 7, 8));
  EXPECT_THAT(packed.rows.supports.rows, ElementsAre(2, 3));
  EXPECT_THAT(packed.rows.supports.offsets, ElementsAre(0, 2, 4));
  EXPECT_THAT(packed.rows.supports.ids, ElementsAre(3, 107, 3, 107));
  EXPECT_THAT(packed.data[0].rows, ElementsAre(0, 1));
  EXPECT_THAT(packed.data[1].rows, ElementsAre(0, 2));
  EXPECT_THAT(packed.data[2].rows, ElementsAre(0, 1));
  EXPECT_THAT(packed.data[3].rows, ElementsAre(0, 3));
  EXPECT_THAT(packed.data[3].entries, ElementsAre(3, 7));
}

TEST(PackTrainTest, ASupportOfATargetThatIsNotScoredIsLeftOut) {
  Datum datum = Tokens({1, 2});
  datum.weights = {0, 1};
  datum.support = {.offsets = {0, 1, 1}, .tokens = {101}};
  const TrainRequest request = Request({datum});
  EXPECT_THAT(Pack({Whole(request, nullptr)}).rows.supports.rows, IsEmpty());
}

TEST(PackTrainTest, ABatchMayScoreNothing) {
  Datum silent = Tokens({5, 6});
  silent.weights = {0, 0};
  const TrainRequest request = Request({silent});
  const PackedTrain packed = Pack({Whole(request, nullptr)});
  EXPECT_EQ(packed.score_index_R.numel(), 0);
  EXPECT_EQ(packed.score_index_R.scalar_type(), at::kLong);
  EXPECT_THAT(packed.rows.row_offsets, ElementsAre(0));
  EXPECT_EQ(packed.data.size(), 1u);
}

// The first 60 tokens are a prompt. In the third sequence, the last 20 tokens
// of the prompt have other experts.
TEST(PackTrainTest, DataShareThePrefixWithEqualExperts) {
  std::vector<Datum> data;
  for (int32_t last = 1; last <= 4; ++last) {
    std::vector<int32_t> tokens(60, 7);
    tokens.push_back(last);
    data.push_back(Tokens(std::move(tokens)));
    if (last < 4) data.back().routing.assign(2 * 61, 5);
  }
  for (size_t i = 40; i < 60; ++i) data[2].routing[2 * i] = 6;
  const TrainRequest request = Request(std::move(data));
  const PackedTrain packed =
      PackTrain({Whole(request, Version())}, /*share_prompts=*/true);
  // The fourth sequence has no routing, so it shares nothing.
  EXPECT_EQ(packed.batch.tokens_T.size(0), 40 + (20 + 2) + 21 + 61);
  const at::Tensor& experts_TE = packed.batch.experts_TE;
  ASSERT_EQ(experts_TE.sizes(),
            at::IntArrayRef({packed.batch.tokens_T.size(0), 2}));
  for (size_t d = 0; d < request.data.size(); ++d) {
    std::vector<int64_t> tokens;
    std::vector<int16_t> experts;
    for (const RowSpan& span : packed.data[d].spans) {
      for (int64_t row = span.begin; row < span.begin + span.count; ++row) {
        tokens.push_back(packed.batch.tokens_T[row].item<int64_t>());
        experts.push_back(experts_TE[row][0].item<int16_t>());
        experts.push_back(experts_TE[row][1].item<int16_t>());
      }
    }
    const Datum& datum = request.data[d];
    EXPECT_THAT(tokens, ::testing::ElementsAreArray(datum.tokens));
    if (d == 3) {
      EXPECT_THAT(experts, ::testing::Each(-1));
    } else {
      EXPECT_THAT(experts, ::testing::ElementsAreArray(datum.routing));
    }
  }
}

TEST(PackTrainTest, ABatchWithoutRoutingHasNoExperts) {
  const TrainRequest request = Request({Tokens({1, 2, 3})});
  EXPECT_FALSE(Pack({Whole(request, Version())}).batch.experts_TE.defined());
}

}  // namespace
}  // namespace weft::engine::batch_packer_test
