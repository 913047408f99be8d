// Compares the products of one adapter on one layer with loops in f64, for the
// shapes of models and for irregular shapes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/cuda/lora/lora_gradient.h"
#include "kernels/cuda/lora/lora_product.h"
#include "kernels/cuda/lora/lora_table_builder.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

constexpr float kScale = 0.5F;

struct Shape {
  int64_t rows;
  int64_t features;
  int64_t rank;
  int64_t stride;  // Stride of X's rows.
  LoraOrder order;

  // The offset of element (rank, feature) of the matrix.
  int64_t At(int64_t r, int64_t f) const {
    return order == LoraOrder::kRankByFeatures ? r * features + f
                                               : f * rank + r;
  }
};

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << shape.rows << " rows, " << shape.features << " features, rank "
             << shape.rank
             << (shape.order == LoraOrder::kRankByFeatures ? ", by rank"
                                                           : ", by feature");
}

std::string ShapeName(const ::testing::TestParamInfo<Shape>& test) {
  const Shape& shape = test.param;
  return "Rows" + std::to_string(shape.rows) + "_Features" +
         std::to_string(shape.features) + "_Rank" + std::to_string(shape.rank) +
         (shape.order == LoraOrder::kRankByFeatures ? "_ByRank" : "_ByFeature");
}

class CudaLoraShapeTest : public CudaKernelTest,
                          public ::testing::WithParamInterface<Shape> {
 protected:
  CudaLoraShapeTest()
      : shape_(GetParam()),
        x_(Random(shape_.rows * shape_.stride, 51)),
        weight_(Random(shape_.rank * shape_.features, 52)),
        shrunk_(Random(shape_.rows * shape_.rank, 53)) {}

  static std::vector<float> Random(int64_t count, uint32_t seed) {
    return Rounded(DType::kBf16, RandomFloats(count, seed, 0.25F));
  }
  double X(int64_t t, int64_t f) const { return x_[t * shape_.stride + f]; }
  double W(int64_t r, int64_t f) const { return weight_[shape_.At(r, f)]; }
  double S(int64_t t, int64_t r) const { return shrunk_[t * shape_.rank + r]; }

  void ExpectProducts(const std::vector<float>& products) const {
    for (int64_t t = 0; t < shape_.rows; ++t) {
      for (int64_t r = 0; r < shape_.rank; ++r) {
        double sum = 0;
        for (int64_t f = 0; f < shape_.features; ++f) sum += X(t, f) * W(r, f);
        ASSERT_NEAR(products[t * shape_.rank + r], kScale * sum,
                    Tolerance(kEpsilonBf16, 1, std::max(4.0, std::abs(sum))))
            << "row " << t << " rank " << r;
      }
    }
  }
  void ExpectAdded(const std::vector<float>& added) const {
    for (int64_t t = 0; t < shape_.rows; ++t) {
      for (int64_t f = 0; f < shape_.stride; ++f) {
        double sum = 0;
        for (int64_t r = 0; f < shape_.features && r < shape_.rank; ++r) {
          sum += S(t, r) * W(r, f);
        }
        ASSERT_NEAR(added[t * shape_.stride + f], X(t, f) + kScale * sum,
                    Tolerance(kEpsilonBf16, 1, std::max(4.0, std::abs(sum))))
            << "row " << t << " feature " << f;
      }
    }
  }
  void ExpectGradient(const std::vector<float>& gradient) const {
    for (int64_t r = 0; r < shape_.rank; ++r) {
      for (int64_t f = 0; f < shape_.features; ++f) {
        double sum = 0;
        for (int64_t t = 0; t < shape_.rows; ++t) sum += S(t, r) * X(t, f);
        ASSERT_NEAR(gradient[shape_.At(r, f)], 3 + kScale * sum,
                    Tolerance(kEpsilonF32, shape_.rows, 8))
            << "rank " << r << " feature " << f;
      }
    }
  }

  Shape shape_;
  std::vector<float> x_, weight_, shrunk_;
};

TEST_P(CudaLoraShapeTest, IsTheFormula) {
  const auto& [rows, features, rank, stride, order] = shape_;
  const DeviceArray x(DType::kBf16, x_), weight(DType::kBf16, weight_);
  const DeviceArray shrunk(DType::kBf16, shrunk_), y(DType::kBf16, x_);
  const DeviceArray product_of_x(
      DType::kBf16, std::vector<float>(static_cast<size_t>(rows * rank), kNan));
  const DeviceBuffer<float> gradient(
      std::vector<float>(static_cast<size_t>(rank * features), 3));
  LoraTableBuilder builder(1);
  builder.AddLayout({{.rank = static_cast<int32_t>(rank), .scale = kScale}});
  builder.AddSegment(0, rows, 0, weight.data(), gradient.data());
  const DeviceBuffer<std::byte> bytes(builder.Finish());
  LoraProduct product = {.table = builder.At(bytes.data()),
                         .order = order,
                         .projections = {{.slot = 0, .features = features}},
                         .num_projections = 1,
                         .max_rank = rank,
                         .features_TF = x.data(),
                         .features_stride = stride,
                         .shrunk_TR = shrunk.data(),
                         .shrunk_stride = rank};
  const DeviceBuffer<float> workspace(std::vector<float>(
      static_cast<size_t>(std::max(LoraShrinkWorkspace(product),
                                   LoraGradientWorkspace(product))),
      kNan));
  const DeviceBuffer<unsigned> counters(
      std::vector<unsigned>(static_cast<size_t>(LoraCounters(product))));
  product.workspace = workspace.data();
  product.counters = counters.data();
  ASSERT_EQ(AddLoraGradient(product, nullptr), cudaSuccess);
  product.features_TF = y.data();
  ASSERT_EQ(RunLoraExpand(product, nullptr), cudaSuccess);
  product.features_TF = x.data();
  product.shrunk_TR = product_of_x.data();
  ASSERT_EQ(RunLoraShrink(product, nullptr), cudaSuccess);

  ExpectProducts(product_of_x.Read());
  ExpectAdded(y.Read());
  ExpectGradient(gradient.Read());
}

constexpr LoraOrder kByRank = LoraOrder::kRankByFeatures;
constexpr LoraOrder kByFeature = LoraOrder::kFeaturesByRank;

INSTANTIATE_TEST_SUITE_P(PublishedModels, CudaLoraShapeTest,
                         ::testing::Values(
                             // The hidden and feed-forward sizes of
                             // Llama-3.1-8B.
                             Shape{40, 4096, 16, 4096, kByRank},
                             Shape{20, 14336, 16, 14336, kByFeature},
                             // SmolLM2.
                             Shape{150, 576, 32, 576, kByFeature},
                             Shape{20, 1536, 8, 1536, kByRank}),
                         ShapeName);

// Aligned rows that end inside a chunk, more ranks than one tile has, and rows
// that are not aligned.
INSTANTIATE_TEST_SUITE_P(Odd, CudaLoraShapeTest,
                         ::testing::Values(Shape{70, 258, 24, 264, kByRank},
                                           Shape{70, 258, 24, 264, kByFeature},
                                           Shape{20, 72, 200, 72, kByRank},
                                           Shape{20, 72, 200, 72, kByFeature},
                                           Shape{33, 129, 13, 131, kByRank}),
                         ShapeName);

}  // namespace
}  // namespace weft::kernels::cuda
