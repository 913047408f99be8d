// Compares the adapters' products of all experts at once (ExpertTable) with
// products in f64 of one expert after another. Without CUDA, the kernels run on
// the host, on CPU tensors.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>

#include "kernels/cuda/lora/lora_product.h"
#include "src/lora/lora_cuda.h"
#include "src/ops/cuda_dispatch.h"
#include "tests/lora/on_device.h"

namespace weft::lora::expert_table_test {
namespace {

constexpr int kLayer = 1;
constexpr int64_t kRows = 110;

// Layer 1 has experts, layer 0 an MLP of other widths.
model_config::ModelShape TheShape() {
  return {.num_layers = 2,
          .hidden = 40,
          .q_width = 16,
          .kv_width = 8,
          .ffn = 70,
          .vocab = 11,
          .experts = {.count = 3,
                      .per_token = 1,
                      .ffn = 24,
                      .shared_ffn = 32,
                      .layers = {false, true}}};
}

at::Tensor RandomBf16(at::IntArrayRef sizes) {
  return at::randn(sizes, at::kDouble).to(at::kBFloat16).to(at::kDouble);
}

AdapterVersionPtr MakeVersion(LoraConfig config) {
  auto version = std::make_shared<AdapterVersion>();
  version->layout = std::make_shared<AdapterLayout>(TheShape(), config);
  version->compute_N = RandomBf16({version->layout->num_parameters()});
  return version;
}

struct Batch {
  ExpertRouting routing;
  LoraGradients gradients;
};

// Makes the rows of three experts. Expert 0 has few rows of `wide`, many rows
// of `some`, and rows of `none`, which adapts no expert. Expert 1 has no rows.
// Expert 2 has rows of `wide` and `some`, rows without an adapter, and rows of
// `down`, which adapts only the down projection.
Batch MakeBatch() {
  using enum TargetModule;
  const AdapterVersionPtr wide = MakeVersion({.rank = 20, .alpha = 10});
  const AdapterVersionPtr some = MakeVersion(
      {.rank = 3, .alpha = 6, .target_modules = {kQProj, kUpProj, kDownProj}});
  const AdapterVersionPtr none =
      MakeVersion({.rank = 2, .alpha = 1, .target_modules = {kVProj}});
  const AdapterVersionPtr down =
      MakeVersion({.rank = 5, .alpha = 5, .target_modules = {kDownProj}});
  return {.routing = {.segments = {{0, 5, wide},
                                   {5, 40, some},
                                   {40, 44, none},
                                   {44, 70, wide},
                                   {75, 82, some},
                                   {82, 100, down}},
                      .experts = {0, 0, 0, 2, 2, 2}},
          .gradients = {{wide, RandomBf16(wide->compute_N.sizes())},
                        {some, RandomBf16(some->compute_N.sizes())},
                        {none, RandomBf16(none->compute_N.sizes())},
                        {down, RandomBf16(down->compute_N.sizes())}}};
}

// Returns the batch with weights and gradients on the device.
Batch BatchOnDevice(const Batch& batch) {
  Batch moved = batch;
  for (LoraGradient& gradient : moved.gradients) {
    const AdapterVersionPtr before = gradient.version;
    auto version = std::make_shared<AdapterVersion>(*before);
    version->compute_N = OnDevice(before->compute_N);
    gradient.version = version;
    gradient.gradient_N =
        gradient.gradient_N.to(TheDevice(), at::kFloat, false, /*copy=*/true);
    for (LoraSegment& segment : moved.routing.segments) {
      if (segment.version == before) segment.version = version;
    }
  }
  return moved;
}

std::shared_ptr<const cuda::ExpertTable> TableOf(const Batch& batch) {
  return std::make_shared<cuda::ExpertTable>(
      batch.routing, kLayer, batch.gradients, TheShape(), TheDevice());
}

// The rows of one site. A pass adds to y and dx.
struct Passage {
  explicit Passage(ProjectionGroup of) : group(of) {
    const model_config::ModelShape shape = TheShape().OfExpert(0);
    const bool is_down = group == ProjectionGroup::kDown;
    const int64_t inputs = is_down ? shape.ffn : shape.hidden;
    const int64_t outputs = is_down ? shape.hidden : 2 * shape.ffn;
    x = RandomBf16({kRows, inputs});
    dy = RandomBf16({kRows, outputs});
    y = RandomBf16({kRows, outputs});
    dx = RandomBf16({kRows, inputs});
  }
  void RunOnDevice(const cuda::RoutingTable& table) {
    const LoraSite site = {.layer = 0, .group = group};
    y = OnDevice(y).clone();
    dx = OnDevice(dx).clone();
    const at::Tensor on_device = OnDevice(x);
    const at::Tensor s = cuda::Forward(on_device, table, site,
                                       /*keeps_shrunk=*/true, y, Stream());
    cuda::Backward(OnDevice(dy), on_device, s, table, site, dx, Stream());
  }
  // Runs the CPU path on one segment at a time.
  void RunOneByOne(Batch& batch) {
    for (size_t i = 0; i < batch.routing.segments.size(); ++i) {
      const int expert = batch.routing.experts[i];
      const LoraRouting routing = {batch.routing.segments[i]};
      const model_config::ModelShape shape = TheShape().OfExpert(expert);
      // A base of zeros leaves only the adapters' part.
      const BaseLinear zeros = {
          .weight_OI = at::zeros({dy.size(1), x.size(1)}, at::kDouble)};
      const LoraPass pass = {.routing = routing, .shape = shape};
      const LoraSite site = {kLayer, group, expert};
      ShrunkInputs shrunk;
      y = y + LoraLinear(x, zeros, pass, site, &shrunk);
      dx = dx + LoraLinearBackward(dy, x, zeros, pass, site, shrunk,
                                   batch.gradients,
                                   /*want_input_gradient=*/true);
    }
  }

  ProjectionGroup group;
  at::Tensor x, dy, y, dx;
};

constexpr ProjectionGroup kGroups[] = {ProjectionGroup::kGateUp,
                                       ProjectionGroup::kDown};

class ExpertTableTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (ops::kHasCudaKernels && !at::hasCUDA()) {
      GTEST_SKIP() << "no CUDA device";
    }
    at::manual_seed(14);
  }
};

TEST_F(ExpertTableTest, ComputesWhatOneExpertAfterAnotherDoes) {
  Batch exact = MakeBatch();
  const Batch batch = BatchOnDevice(exact);
  const auto table = TableOf(batch);
  for (const ProjectionGroup group : kGroups) {
    Passage p(group);
    Passage expected = p;
    expected.RunOneByOne(exact);
    p.RunOnDevice(*table);
    ExpectNearInBf16(p.y, expected.y, "y");
    ExpectNearInBf16(p.dx, expected.dx, "dx");
  }
  for (size_t i = 0; i < exact.gradients.size(); ++i) {
    ExpectNearInBf16(batch.gradients[i].gradient_N,
                     exact.gradients[i].gradient_N, "gradient");
  }
}

TEST_F(ExpertTableTest, GivesAnAdapterTheSameBitsWithoutItsNeighbours) {
  const Batch made = MakeBatch();
  const Batch all = BatchOnDevice(made);
  Batch alone = BatchOnDevice(made);
  ExpertRouting& routing = alone.routing;
  routing = {.segments = {routing.segments[1], routing.segments[4]},
             .experts = {0, 2}};
  for (const ProjectionGroup group : kGroups) {
    Passage with(group);
    Passage without = with;
    with.RunOnDevice(*TableOf(all));
    without.RunOnDevice(*TableOf(alone));
    for (const LoraSegment& segment : routing.segments) {
      const auto rows = [&](const at::Tensor& x) {
        return x.slice(0, segment.begin, segment.end);
      };
      EXPECT_TRUE(at::equal(rows(with.y), rows(without.y)));
      EXPECT_TRUE(at::equal(rows(with.dx), rows(without.dx)));
    }
  }
  EXPECT_TRUE(
      at::equal(all.gradients[1].gradient_N, alone.gradients[1].gradient_N));
}

// Experts have many short segments. A workspace for their parts would be larger
// than their rows.
TEST_F(ExpertTableTest, ShrinksWithoutWorkspace) {
  const auto table = TableOf(BatchOnDevice(MakeBatch()));
  for (const ProjectionGroup group : kGroups) {
    const LoraSite site = {.layer = 0, .group = group};
    EXPECT_EQ(LoraShrinkWorkspace(table->ProductsOfA(site)), 0);
    EXPECT_EQ(LoraShrinkWorkspace(table->ProductsOfB(site)), 0);
  }
}

TEST_F(ExpertTableTest, IsOnlyForBf16) {
  const Batch batch = MakeBatch();
  EXPECT_THROW(TableOf(batch), c10::Error);
}

TEST_F(ExpertTableTest, HasALimitOfRowBlocks) {
  ExpertRouting routing;
  for (int64_t i = 0; i < cuda::kMaxExpertBlocks; ++i) {
    routing.segments.push_back({.begin = i, .end = i + 1});
  }
  EXPECT_TRUE(cuda::FitsExpertTable(routing));
  // A second row block of the last segment is one too many.
  routing.segments.back().end += kernels::cuda::kLoraBlockRows;
  EXPECT_FALSE(cuda::FitsExpertTable(routing));
}

}  // namespace
}  // namespace weft::lora::expert_table_test
