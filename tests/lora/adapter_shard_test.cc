#include "src/lora/adapter_shard.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "src/lora/adapter.h"

namespace weft::lora::adapter_shard_test {
namespace {

using parallel::Range;

constexpr model_config::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 6,
                                             .q_width = 12,
                                             .kv_width = 4,
                                             .ffn = 9,
                                             .vocab = 11};

// The ranges of two ranks. Both ranks have the second half of the key/value
// features.
const model_config::ShapeRanges kRanges[] = {
    {.q = {0, 4}, .kv = {0, 4}, .ffn = {0, 5}, .vocab = {0, 6}},
    {.q = {4, 12}, .kv = {2, 4}, .ffn = {5, 9}, .vocab = {6, 11}}};

model_config::ModelShape LocalShape(const model_config::ShapeRanges& ranges) {
  model_config::ModelShape shape = kShape;
  shape.q_width = ranges.q.size();
  shape.kv_width = ranges.kv.size();
  shape.ffn = ranges.ffn.size();
  shape.vocab = ranges.vocab.size();
  return shape;
}

// Targets every module, except the up projection of layer 1. The v projection
// of layer 0 has its own rank.
LoraConfig EveryModule() {
  return {
      .rank = 3,
      .alpha = 6,
      .target_modules = {kAllTargetModules.begin(), kAllTargetModules.end()},
      .overrides = {{0, TargetModule::kVProj, {2, 5}},
                    {1, TargetModule::kUpProj, {}}}};
}

// A rank's part of A [rank, in] and of B [out, rank], computed from the
// definition.
struct Part {
  Range columns_of_A;
  Range rows_of_B;
};

Part PartOf(const LoraFactor& factor, const model_config::ShapeRanges& ranges) {
  Part part{{0, factor.in}, {0, factor.out}};
  switch (factor.module) {
    case TargetModule::kQProj:
      part.rows_of_B = ranges.q;
      break;
    case TargetModule::kKProj:
    case TargetModule::kVProj:
      part.rows_of_B = ranges.kv;
      break;
    case TargetModule::kOProj:
      part.columns_of_A = ranges.q;
      break;
    case TargetModule::kGateProj:
    case TargetModule::kUpProj:
      part.rows_of_B = ranges.ffn;
      break;
    case TargetModule::kDownProj:
      part.columns_of_A = ranges.ffn;
      break;
    case TargetModule::kLmHead:
      part.rows_of_B = ranges.vocab;
      break;
    case TargetModule::kEmbedTokens:
      part.columns_of_A = ranges.vocab;
      break;
    default:
      ADD_FAILURE() << "a module that the shape does not have";
  }
  return part;
}

class AdapterShardTest : public ::testing::Test {
 protected:
  AdapterShardTest() {
    for (const model_config::ShapeRanges& ranges : kRanges) {
      locals_.emplace_back(LocalShape(ranges), EveryModule());
      shards_.emplace_back(whole_, locals_.back(), ranges);
    }
  }

  static at::Tensor MatrixA(const at::Tensor& flat, const LoraFactor& factor) {
    return flat.narrow(0, factor.a_offset, factor.rank * factor.in)
        .view({factor.rank, factor.in});
  }
  static at::Tensor MatrixB(const at::Tensor& flat, const LoraFactor& factor) {
    return flat.narrow(0, factor.b_offset, factor.out * factor.rank)
        .view({factor.out, factor.rank});
  }

  const AdapterLayout whole_{kShape, EveryModule()};
  std::vector<AdapterLayout> locals_;
  std::vector<AdapterShard> shards_;
};

TEST_F(AdapterShardTest, SliceHasTheRanksRowsAndColumns) {
  const at::Tensor flat = at::arange(whole_.num_parameters(), at::kFloat);
  for (size_t rank = 0; rank < 2; ++rank) {
    const at::Tensor local = shards_[rank].Slice(flat);
    ASSERT_EQ(local.numel(), locals_[rank].num_parameters());
    for (size_t i = 0; i < whole_.factors().size(); ++i) {
      const LoraFactor& factor = whole_.factors()[i];
      const LoraFactor& own = locals_[rank].factors()[i];
      const Part part = PartOf(factor, kRanges[rank]);
      EXPECT_TRUE(at::equal(
          MatrixA(local, own),
          MatrixA(flat, factor)
              .slice(1, part.columns_of_A.begin, part.columns_of_A.end)))
          << ModulePath(factor);
      EXPECT_TRUE(
          at::equal(MatrixB(local, own),
                    MatrixB(flat, factor)
                        .slice(0, part.rows_of_B.begin, part.rows_of_B.end)))
          << ModulePath(factor);
    }
  }
}

TEST_F(AdapterShardTest, GradientsOfAllRanksAddUp) {
  // Every element starts at 1. Each rank that has the element adds 1.
  at::Tensor counts = at::ones({whole_.num_parameters()});
  for (size_t rank = 0; rank < 2; ++rank) {
    shards_[rank].AddTo(at::ones({locals_[rank].num_parameters()}), counts);
  }
  for (const LoraFactor& factor : whole_.factors()) {
    at::Tensor a = at::ones({factor.rank, factor.in});
    at::Tensor b = at::ones({factor.out, factor.rank});
    for (const model_config::ShapeRanges& ranges : kRanges) {
      const Part part = PartOf(factor, ranges);
      a.slice(1, part.columns_of_A.begin, part.columns_of_A.end).add_(1);
      b.slice(0, part.rows_of_B.begin, part.rows_of_B.end).add_(1);
    }
    EXPECT_TRUE(at::equal(MatrixA(counts, factor), a)) << ModulePath(factor);
    EXPECT_TRUE(at::equal(MatrixB(counts, factor), b)) << ModulePath(factor);
  }
}

TEST_F(AdapterShardTest, BuffersOfOtherAdaptersThrow) {
  at::Tensor whole = at::zeros({whole_.num_parameters()});
  EXPECT_THROW((void)shards_[0].Slice(whole.slice(0, 1)), c10::Error);
  EXPECT_THROW(shards_[0].AddTo(whole, whole), c10::Error);
  LoraConfig fewer = EveryModule();
  std::erase(fewer.target_modules, TargetModule::kEmbedTokens);
  const AdapterLayout other(LocalShape(kRanges[0]), fewer);
  EXPECT_THROW(AdapterShard(whole_, other, kRanges[0]), c10::Error);
}

// One layer with a gated delta rule: two key heads of 2 features, each with two
// value heads of 3.
model_config::ModelShape DeltaShapeOf(int key_heads, bool is_fused) {
  return {.num_layers = 1,
          .hidden = 5,
          .ffn = 4,
          .delta = {.layers = {true},
                    .key_heads = key_heads,
                    .value_heads = 2 * key_heads,
                    .key_features = 2,
                    .value_features = 3,
                    .is_fused = is_fused}};
}

TEST(DeltaShardTest, ARankHasABlockOfEachKindOfFeature) {
  for (const bool is_fused : {false, true}) {
    const LoraConfig config = {
        .rank = 1,
        .target_modules = {TargetModule::kInProjQkv, TargetModule::kInProjZ,
                           TargetModule::kInProjB, TargetModule::kOutProj,
                           TargetModule::kInProjQkvz, TargetModule::kInProjBa}};
    const model_config::ModelShape shape = DeltaShapeOf(2, is_fused);
    const AdapterLayout whole(shape, config);
    const AdapterLayout local(DeltaShapeOf(1, is_fused), config);
    const model_config::ShapeRanges second = {.ffn = {0, 4},
                                              .delta_key = {2, 4},
                                              .delta_value = {6, 12},
                                              .delta_heads = {2, 4},
                                              .delta = shape.delta};
    const AdapterShard shard(whole, local, second);
    const at::Tensor flat = at::arange(whole.num_parameters(), at::kLong);
    const at::Tensor part = shard.Slice(flat);
    // Rows of B, with rank 1.
    const auto rows = [&](size_t index) {
      const LoraFactor& own = local.factors()[index];
      const at::Tensor b = part.narrow(0, own.b_offset, own.out) -
                           whole.factors()[index].b_offset;
      return std::vector<int64_t>(b.data_ptr<int64_t>(),
                                  b.data_ptr<int64_t>() + b.numel());
    };
    std::vector<int64_t> inputs = {2, 3, 6, 7, 14, 15, 16, 17, 18, 19};
    if (is_fused) {
      for (int64_t z = 26; z < 32; ++z) inputs.push_back(z);
      EXPECT_EQ(rows(1), (std::vector<int64_t>{2, 3, 6, 7}));
    } else {
      EXPECT_EQ(rows(1), (std::vector<int64_t>{6, 7, 8, 9, 10, 11}));
      EXPECT_EQ(rows(2), (std::vector<int64_t>{2, 3}));
    }
    EXPECT_EQ(rows(0), inputs);
    const LoraFactor& out = local.factors().back();
    EXPECT_EQ(part[out.a_offset].item<int64_t>(),
              whole.factors().back().a_offset + 6);
  }
}

TEST(DeltaShardTest, AGateIsWithItsQuery) {
  model_config::ModelShape whole = kShape, local = kShape;
  whole.gate_width = whole.q_width;
  local.q_width = local.gate_width = 4;
  const LoraConfig config = {.rank = 1,
                             .target_modules = {TargetModule::kQProj}};
  const AdapterLayout all(whole, config), own(local, config);
  const AdapterShard shard(
      all, own, {.q = {8, 12}, .kv = {0, 4}, .ffn = {0, 9}, .q_rows = 2});
  const at::Tensor part =
      shard.Slice(at::arange(all.num_parameters(), at::kLong));
  const int64_t first = part[own.factors()[0].b_offset].item<int64_t>();
  EXPECT_EQ(first, all.factors()[0].b_offset + 16);
}

}  // namespace
}  // namespace weft::lora::adapter_shard_test
