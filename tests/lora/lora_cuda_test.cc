// Tests the CUDA code for the adapters' part of a linear layer. Compares it
// with AddStackedAndMasked in f64. Without CUDA, the kernels run on the host,
// on CPU tensors.
#include "src/lora/lora_cuda.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/lora/lora_gradient.h"
#include "src/ops/cuda_dispatch.h"
#include "tests/lora/mixed_routing.h"
#include "tests/lora/on_device.h"
#include "tests/lora/stacked_masked.h"

namespace weft::lora::lora_cuda_test {
namespace {

constexpr LoraSite kQkv = {0, ProjectionGroup::kQkv};

// The inputs and outputs of one site.
struct Passage {
  explicit Passage(const LoraSite& site)
      : x_TI(RandomBf16({kMixedRows, InputsOf(site)}, 1)),
        dy_TO(RandomBf16({kMixedRows, OutputsOf(site)}, 1)),
        y_TO(RandomBf16({kMixedRows, OutputsOf(site)}, 1)),
        dx_TI(RandomBf16({kMixedRows, InputsOf(site)}, 1)) {}

  at::Tensor x_TI, dy_TO;
  at::Tensor y_TO, dx_TI;  // The pass adds to these.
};

class LoraCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (ops::kHasCudaKernels && !at::hasCUDA()) {
      GTEST_SKIP() << "no CUDA device";
    }
    at::manual_seed(12);
    made_ = MakeMixedBatch();
  }
  MixedBatch Exact() const {
    return Converted(made_, at::kCPU, at::kDouble, at::kDouble);
  }
  MixedBatch BatchOnDevice() const {
    return Converted(made_, TheDevice(), at::kBFloat16, at::kFloat);
  }
  // Runs the CUDA path.
  static void Run(const RoutingTablePtr& table, const LoraSite& site,
                  Passage* p) {
    const at::Tensor x = OnDevice(p->x_TI), dy = OnDevice(p->dy_TO);
    p->y_TO = OnDevice(p->y_TO).clone();
    p->dx_TI = OnDevice(p->dx_TI).clone();
    const at::Tensor s = cuda::Forward(x, *table, site, /*keeps_shrunk=*/true,
                                       p->y_TO, Stream());
    cuda::Backward(dy, x, s, *table, site, p->dx_TI, Stream());
  }
  static RoutingTablePtr TableOf(const MixedBatch& batch) {
    return std::make_shared<cuda::RoutingTable>(batch.routing, batch.gradients,
                                                kMixedShape, TheDevice());
  }

  MixedBatch made_;
};

// All sites of all layers use one table and add to the same gradients.
TEST_F(LoraCudaTest, IsTheStackedFormAtEverySite) {
  const MixedBatch batch = BatchOnDevice();
  const RoutingTablePtr table = TableOf(batch);
  const MixedBatch stacked = Exact();
  for (const LoraSite& site : kMixedSites) {
    SCOPED_TRACE("layer " + std::to_string(site.layer) + " group " +
                 std::to_string(static_cast<int>(site.group)));
    Passage p(site);
    const Passage before = p;
    at::Tensor stacked_y = p.y_TO.clone(), stacked_dx = p.dx_TI.clone();
    AddStackedAndMasked(p.x_TI, p.dy_TO, stacked.routing, stacked.gradients,
                        site, kMixedShape, stacked_y, stacked_dx);
    Run(table, site, &p);
    ExpectNearInBf16(p.y_TO, stacked_y, "y");
    ExpectNearInBf16(p.dx_TI, stacked_dx, "dx");
    // Rows outside all segments keep every bit.
    EXPECT_TRUE(at::equal(p.y_TO.slice(0, 204, 210),
                          OnDevice(before.y_TO.slice(0, 204, 210))));
    EXPECT_TRUE(
        at::equal(p.dx_TI.slice(0, 395), OnDevice(before.dx_TI.slice(0, 395))));
  }
  for (size_t i = 0; i < batch.routing.size(); ++i) {
    ExpectNearInBf16(batch.Gradient(i), stacked.Gradient(i), "gradient");
  }
}

TEST_F(LoraCudaTest, GivesAnAdapterTheSameBitsWithoutItsNeighbours) {
  const MixedBatch all = BatchOnDevice(), others = BatchOnDevice();
  const MixedBatch alone = {.routing = {others.routing[2]},
                            .gradients = others.gradients};
  const Passage start(kQkv);
  Passage with = start, without = start;
  Run(TableOf(all), kQkv, &with);
  Run(TableOf(alone), kQkv, &without);
  const auto rows = [&](const at::Tensor& x) {
    return x.slice(0, alone.routing[0].begin, alone.routing[0].end);
  };
  EXPECT_TRUE(at::equal(rows(with.y_TO), rows(without.y_TO)));
  EXPECT_TRUE(at::equal(rows(with.dx_TI), rows(without.dx_TI)));
  EXPECT_TRUE(at::equal(all.Gradient(2), alone.Gradient(0)));
}

// Returns the largest workspace of a gradient in layer 0, in bytes. Each entry
// of `rows` is the number of rows of an adapter of rank 33.
int64_t LargestWorkspace(const model_config::ModelShape& shape,
                         const std::vector<int64_t>& rows) {
  auto layout = std::make_shared<const AdapterLayout>(
      shape, LoraConfig{.rank = 33, .target_modules = DefaultTargetModules()});
  const at::TensorOptions options(TheDevice());
  LoraRouting routing;
  LoraGradients gradients;
  for (const int64_t count : rows) {
    auto version = std::make_shared<AdapterVersion>();
    version->layout = layout;
    version->compute_N =
        at::empty({layout->num_parameters()}, options.dtype(at::kBFloat16));
    const int64_t begin = routing.empty() ? 0 : routing.back().end;
    routing.push_back(
        {.begin = begin, .end = begin + count, .version = version});
    gradients.push_back({.version = version,
                         .gradient_N = at::empty({layout->num_parameters()},
                                                 options.dtype(at::kFloat))});
  }
  const cuda::RoutingTable table(routing, gradients, shape, TheDevice());
  int64_t floats = 0;
  for (const ProjectionGroup group :
       {ProjectionGroup::kQkv, ProjectionGroup::kO, ProjectionGroup::kGateUp,
        ProjectionGroup::kDown}) {
    for (const kernels::cuda::LoraProduct& product :
         {table.ProductsOfA({0, group}), table.ProductsOfB({0, group})}) {
      floats = std::max(floats, kernels::cuda::LoraGradientWorkspace(product));
    }
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

TEST_F(LoraCudaTest, BoundsTheWorkspaceOfAGradientForAnySplitOfTheRows) {
  constexpr int64_t kPart = kernels::cuda::kLoraPartRows;
  // In the first shape, B has the largest gradient. In the second, the stacked
  // A of q, k and v has the largest one.
  model_config::ModelShape narrow = kMixedShape;
  narrow.hidden = 1000;
  for (const model_config::ModelShape& shape : {kMixedShape, narrow}) {
    const auto bound = [&](int64_t rows) {
      return GradientWorkspaceBytes(rows, shape, /*rank=*/33);
    };
    EXPECT_EQ(bound(kPart), 0);
    // These splits of the rows need the largest possible number of parts.
    EXPECT_EQ(LargestWorkspace(shape, {kPart + 1}), bound(kPart + 1));
    EXPECT_EQ(LargestWorkspace(shape, {kPart + 1, kPart + 1}),
              bound(2 * kPart + 2));
    EXPECT_EQ(LargestWorkspace(shape, {kPart + 1, 2 * kPart + 1}),
              bound(3 * kPart + 2));
    for (const std::vector<int64_t>& rows :
         std::vector<std::vector<int64_t>>{{kPart},
                                           {2 * kPart + 2},
                                           {kPart + 2, 1, kPart + 1},
                                           {3 * kPart, kPart + 1, 5}}) {
      EXPECT_LE(LargestWorkspace(shape, rows),
                bound(std::accumulate(rows.begin(), rows.end(), int64_t{0})));
    }
  }
}

TEST_F(LoraCudaTest, LeavesGradientsOutOnDemand) {
  MixedBatch batch = BatchOnDevice();
  const at::Tensor frozen = batch.Gradient(1);
  const std::vector<at::Tensor> before = {frozen.clone(),
                                          batch.Gradient(2).clone()};
  std::erase_if(batch.gradients, [&](const LoraGradient& gradient) {
    return gradient.version == batch.routing[1].version;
  });
  const RoutingTablePtr table = TableOf(batch);
  const Passage p(kQkv);
  const at::Tensor x = OnDevice(p.x_TI);
  at::Tensor none;
  cuda::Backward(OnDevice(p.dy_TO), x, cuda::Shrink(x, *table, kQkv, Stream()),
                 *table, kQkv, none, Stream());
  EXPECT_FALSE(none.defined());
  EXPECT_TRUE(at::equal(frozen, before[0]));
  EXPECT_FALSE(at::equal(batch.Gradient(2), before[1]));
}

TEST_F(LoraCudaTest, TakesAdaptersWithNothingAtTheSite) {
  MixedBatch head_only = BatchOnDevice();
  head_only.routing = {head_only.routing.back()};
  const RoutingTablePtr table = TableOf(head_only);
  const at::Tensor before = head_only.Gradient(0).clone();
  const Passage start(kQkv);
  Passage p = start;
  EXPECT_FALSE(
      cuda::Shrink(OnDevice(p.x_TI), *table, kQkv, Stream()).defined());
  Run(table, kQkv, &p);
  EXPECT_TRUE(at::equal(p.y_TO, OnDevice(start.y_TO)));
  EXPECT_TRUE(at::equal(p.dx_TI, OnDevice(start.dx_TI)));
  EXPECT_TRUE(at::equal(head_only.Gradient(0), before));
}

TEST_F(LoraCudaTest, RefusesRowsThatTheRoutingIsNotOf) {
  const MixedBatch batch = BatchOnDevice();
  const RoutingTablePtr table = TableOf(batch);
  const Passage p(kQkv);
  const at::Tensor x = OnDevice(p.x_TI), dy = OnDevice(p.dy_TO);
  EXPECT_THROW(static_cast<void>(
                   cuda::Shrink(x.slice(0, 0, 394), *table, kQkv, Stream())),
               c10::Error);
  const at::Tensor s = cuda::Shrink(x, *table, kQkv, Stream());
  at::Tensor none, y = OnDevice(p.y_TO).slice(0, 0, 394);
  EXPECT_THROW(
      cuda::Forward(x, *table, kQkv, /*keeps_shrunk=*/true, y, Stream()),
      c10::Error);
  EXPECT_THROW(
      cuda::Backward(dy, x, s.slice(0, 0, 399), *table, kQkv, none, Stream()),
      c10::Error);
}

// Writes the routing to bytes on the device and binds the table to them.
// Returns the bytes.
at::Tensor Bind(cuda::DecodeTable& table, const LoraRouting& routing) {
  std::vector<std::byte> host(table.num_bytes());
  table.Write(routing, host);
  at::Tensor bytes =
      at::from_blob(host.data(), {static_cast<int64_t>(host.size())}, at::kByte)
          .to(TheDevice(), at::kByte, /*non_blocking=*/false, /*copy=*/true);
  table.Bind(bytes.const_data_ptr());
  return bytes;
}

TEST_F(LoraCudaTest, DecodesOneRoutingAfterTheOtherWithOneTable) {
  const LoraRouting all = BatchOnDevice().routing, exact = Exact().routing;
  cuda::DecodeTable table({.rows = 24, .layouts = 3, .rank = 70}, kMixedShape);
  std::vector<std::byte> host(table.num_bytes());
  const at::Tensor bytes =
      at::empty({static_cast<int64_t>(host.size())},
                at::TensorOptions(TheDevice()).dtype(at::kByte));
  table.Bind(bytes.const_data_ptr());
  struct Rows {
    size_t adapter;
    int64_t begin, end;
  };
  for (const std::vector<Rows>& batch : std::vector<std::vector<Rows>>{
           {{0, 0, 17}, {2, 18, 19}, {1, 19, 24}}, {{2, 3, 5}}, {}}) {
    LoraRouting own, own_exact;
    for (const Rows& rows : batch) {
      own.push_back({rows.begin, rows.end, all[rows.adapter].version});
      own_exact.push_back({rows.begin, rows.end, exact[rows.adapter].version});
    }
    ASSERT_TRUE(table.Fits(own));
    table.Write(own, host);
    bytes.copy_(at::from_blob(host.data(), bytes.sizes(), at::kByte));
    for (const LoraSite& site : kMixedSites) {
      if (site.group == ProjectionGroup::kLmHead) continue;
      const Passage p(site);
      const BaseLinear zeros = {
          .weight_OI =
              at::zeros({OutputsOf(site), InputsOf(site)}, at::kDouble)};
      const LoraPass pass = {.routing = own_exact, .shape = kMixedShape};
      const at::Tensor expected =
          p.y_TO + LoraLinear(p.x_TI, zeros, pass, site, nullptr);
      at::Tensor y = OnDevice(p.y_TO).clone();
      EXPECT_FALSE(cuda::Forward(OnDevice(p.x_TI), table, site,
                                 /*keeps_shrunk=*/false, y, Stream())
                       .defined());
      ExpectNearInBf16(y, expected, "y");
    }
  }
}

// With both tables, a short segment uses the kernels for few rows.
TEST_F(LoraCudaTest, DecodesAShortSegmentToTheBitsOfAnyForwardPass) {
  const MixedBatch batch = BatchOnDevice();
  const LoraRouting& routing = batch.routing;
  cuda::DecodeTable table({.rows = kMixedRows, .layouts = 4, .rank = 128},
                          kMixedShape);
  const at::Tensor bytes = Bind(table, routing);
  const Passage p(kQkv);
  at::Tensor decoded = OnDevice(p.y_TO).clone(), y = decoded.clone();
  static_cast<void>(cuda::Forward(OnDevice(p.x_TI), table, kQkv,
                                  /*keeps_shrunk=*/false, decoded, Stream()));
  static_cast<void>(cuda::Forward(OnDevice(p.x_TI), *TableOf(batch), kQkv,
                                  /*keeps_shrunk=*/true, y, Stream()));
  for (const size_t i : {1, 3}) {
    ASSERT_LE(routing[i].end - routing[i].begin, kernels::cuda::kLoraFewRows);
    const auto rows = [&](const at::Tensor& x) {
      return x.slice(0, routing[i].begin, routing[i].end);
    };
    EXPECT_TRUE(at::equal(rows(decoded), rows(y)));
  }
}

// With and without a graph, a decode step uses the kernels for few rows for all
// segments, even for long ones.
TEST_F(LoraCudaTest, DecodesToTheSameBitsWithoutACapacity) {
  const LoraRouting routing = BatchOnDevice().routing;
  cuda::DecodeTable table({.rows = kMixedRows, .layouts = 4, .rank = 128},
                          kMixedShape);
  const cuda::RoutingTable exact(routing, /*gradients=*/{}, kMixedShape,
                                 TheDevice(), /*decode=*/true);
  EXPECT_EQ(exact.table().num_long_blocks, 0);
  int64_t num_rows = 0;
  for (const LoraSegment& segment : routing) {
    num_rows += segment.end - segment.begin;
  }
  EXPECT_EQ(exact.table().max_few_rows, num_rows);
  const at::Tensor bytes = Bind(table, routing);
  const Passage p(kQkv);
  at::Tensor y = OnDevice(p.y_TO).clone(), other = y.clone();
  static_cast<void>(cuda::Forward(OnDevice(p.x_TI), table, kQkv,
                                  /*keeps_shrunk=*/false, y, Stream()));
  static_cast<void>(cuda::Forward(OnDevice(p.x_TI), exact, kQkv,
                                  /*keeps_shrunk=*/false, other, Stream()));
  EXPECT_TRUE(at::equal(y, other));
}

TEST_F(LoraCudaTest, DecodesWithinACapacityAlone) {
  const LoraRouting routing = BatchOnDevice().routing;
  const auto fits = [&](const cuda::DecodeCapacity& capacity) {
    return cuda::DecodeTable(capacity, kMixedShape).Fits(routing);
  };
  EXPECT_TRUE(fits({.rows = 395, .layouts = 4, .rank = 70}));
  EXPECT_FALSE(fits({.rows = 394, .layouts = 4, .rank = 70}));
  EXPECT_FALSE(fits({.rows = 395, .layouts = 3, .rank = 70}));
  EXPECT_FALSE(fits({.rows = 395, .layouts = 4, .rank = 69}));
  const cuda::DecodeTable small({.rows = 1, .rank = 8}, kMixedShape);
  std::vector<std::byte> host(small.num_bytes());
  EXPECT_THROW(small.Write(routing, host), c10::Error);
  EXPECT_THROW(small.Write({}, std::span(host).first(16)), c10::Error);
}

// Computes S of long and short segments, once together with y and once alone.
TEST_F(LoraCudaTest, ShrinksToTheSameBitsWithoutTheOutputs) {
  const MixedBatch batch = BatchOnDevice();
  const RoutingTablePtr table = TableOf(batch);
  const Passage p(kQkv);
  at::Tensor y = OnDevice(p.y_TO).clone();
  const at::Tensor with = cuda::Forward(OnDevice(p.x_TI), *table, kQkv,
                                        /*keeps_shrunk=*/true, y, Stream());
  const at::Tensor without =
      cuda::Shrink(OnDevice(p.x_TI), *table, kQkv, Stream());
  for (const LoraSegment& segment : batch.routing) {
    const int64_t rank = GroupOf(segment, kQkv).total_rank;
    const auto own = [&](const at::Tensor& s) {
      return s.slice(0, segment.begin, segment.end).slice(1, 0, rank);
    };
    EXPECT_TRUE(at::equal(own(with), own(without)));
  }
}

TEST_F(LoraCudaTest, IsForBf16OnADeviceAlone) {
  const LoraRouting routing = BatchOnDevice().routing;
  const auto makes_table = [&](const LoraRouting& r, at::ScalarType dtype,
                               at::Device device) {
    return MakeRoutingTable(r, /*gradients=*/{}, kMixedShape, dtype, device) !=
           nullptr;
  };
  EXPECT_EQ(makes_table(routing, at::kBFloat16, TheDevice()),
            ops::kHasCudaKernels);
  EXPECT_FALSE(makes_table(routing, at::kFloat, TheDevice()));
  EXPECT_FALSE(makes_table(routing, at::kBFloat16, at::kCPU));
  EXPECT_FALSE(makes_table({}, at::kBFloat16, TheDevice()));
  EXPECT_FALSE(makes_table(Exact().routing, at::kBFloat16, TheDevice()));
}

}  // namespace
}  // namespace weft::lora::lora_cuda_test
