// Checks the results of LoraProblem.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "tests/bench/kernels_cuda/lora_problem.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr int64_t N = kLoraRows;
constexpr int64_t K = kLoraWidth;

// bf16 elements in device memory that are `stride` apart.
struct Strided {
  const uint16_t* data = nullptr;
  int64_t stride = 0;

  std::vector<uint16_t> Read(int64_t count) const {
    std::vector<uint16_t> host(static_cast<size_t>(count));
    Check(cudaMemcpy2D(host.data(), sizeof(uint16_t), data,
                       static_cast<size_t>(stride) * sizeof(uint16_t),
                       sizeof(uint16_t), host.size(), cudaMemcpyDeviceToHost));
    return host;
  }
};

// CheckStep checks kNumPlaces elements in the result of the first, the middle
// and the last adapter. Spread() gives kNumPlaces indices in each dimension.
// Place i has the i-th index in one dimension and the kOtherPlaces[i]-th index
// in the other, so most places are off the diagonal.
constexpr int64_t kOtherPlaces[] = {0, 3, 6, 2, 5, 1, 4, 7};
constexpr int64_t kNumPlaces = std::size(kOtherPlaces);

// Returns the index of a place in a dimension of `count`. The first place has
// index 0, and the last has index count - 1.
int64_t Spread(int64_t count, int64_t place) {
  return (count - 1) * place / (kNumPlaces - 1);
}

template <typename T>
T ReadOne(const T* device) {
  T value;
  Check(cudaMemcpy(&value, device, sizeof(T), cudaMemcpyDeviceToHost));
  return value;
}

}  // namespace

// An element of a result: the sum of factor * left[i] * right[i], plus the old
// value if `adds`.
struct LoraProblem::Element {
  const uint16_t* bf16 = nullptr;  // Points to a bf16 result.
  const float* f32 = nullptr;      // Points to an f32 result.
  bool adds = true;
  double factor = 1;
  int64_t count = 0;
  Strided left, right;

  double Read() const {
    return f32 != nullptr ? ReadOne(f32) : FromBf16(ReadOne(bf16));
  }
};

// Returns the element of a step's result at a place, with the terms of its sum.
LoraProblem::Element LoraProblem::ElementOf(LoraStep step, int64_t adapter,
                                            int64_t place) const {
  const auto& [rank, offset] = adapters_[static_cast<size_t>(adapter)];
  const int64_t begin = adapter * rows_each_;
  const bool is_gradient =
      step == LoraStep::kGradientOfA || step == LoraStep::kGradientOfB;
  const int64_t row = begin + Spread(rows_each_, place);
  const int64_t r = Spread(rank, is_gradient ? place : kOtherPlaces[place]);
  const int64_t f = Spread(K, kOtherPlaces[place]);
  const uint16_t* const s = s_->data();
  const uint16_t* const ds = ds_->data();
  const uint16_t* const a = weights_->data() + offset;
  const uint16_t* const b = a + rank * K;
  const float* const da = gradients_->data() + offset;
  const LoraActivations& x = activations_;
  switch (step) {
    case LoraStep::kShrink:
      return {.bf16 = s + row * max_rank_ + r,
              .adds = false,
              .count = K,
              .left = {x.x.data() + row * K, 1},
              .right = {a + r * K, 1}};
    case LoraStep::kExpand:
      return {.bf16 = x.y.data() + row * K + f,
              .factor = kLoraScale,
              .count = rank,
              .left = {s + row * max_rank_, 1},
              .right = {b + f * rank, 1}};
    case LoraStep::kShrunkGradient:
      return {.bf16 = ds + row * max_rank_ + r,
              .adds = false,
              .factor = kLoraScale,
              .count = K,
              .left = {x.dy.data() + row * K, 1},
              .right = {b + r, rank}};
    case LoraStep::kInputGradient:
      return {.bf16 = x.dx.data() + row * K + f,
              .count = rank,
              .left = {ds + row * max_rank_, 1},
              .right = {a + f, K}};
    case LoraStep::kGradientOfA:
      return {.f32 = da + r * K + f,
              .count = rows_each_,
              .left = {ds + begin * max_rank_ + r, max_rank_},
              .right = {x.x.data() + begin * K + f, K}};
    case LoraStep::kGradientOfB:
      return {.f32 = da + (K + f) * rank + r,
              .factor = kLoraScale,
              .count = rows_each_,
              .left = {x.dy.data() + begin * K + f, K},
              .right = {s + begin * max_rank_ + r, max_rank_}};
  }
  return {};
}

void LoraProblem::CheckStep(LoraStep step) const {
  const auto last_adapter = static_cast<int64_t>(adapters_.size()) - 1;
  std::vector<Element> elements;
  std::vector<double> expected, largest;
  for (const int64_t adapter : {int64_t{0}, last_adapter / 2, last_adapter}) {
    for (int64_t place = 0; place < kNumPlaces; ++place) {
      const Element e = ElementOf(step, adapter, place);
      const std::vector<uint16_t> left = e.left.Read(e.count);
      const std::vector<uint16_t> right = e.right.Read(e.count);
      double sum = 0, on_the_way = 0;
      for (size_t i = 0; i < left.size(); ++i) {
        sum += e.factor * FromBf16(left[i]) * FromBf16(right[i]);
        on_the_way = std::max(on_the_way, std::abs(sum));
      }
      elements.push_back(e);
      expected.push_back((e.adds ? e.Read() : 0) + sum);
      largest.push_back(on_the_way);
    }
  }
  Run(step);
  for (size_t i = 0; i < elements.size(); ++i) {
    CheckNear(elements[i].Read(), expected[i],
              elements[i].f32 != nullptr ? kEpsilonF32 : kEpsilonBf16,
              elements[i].count, largest[i],
              std::string("the ") + NameOf(step));
  }
}

void LoraProblem::CheckResults() const {
  for (const LoraStep step : kLoraSteps) CheckStep(step);
}

}  // namespace weft::kernels::cuda::bench
