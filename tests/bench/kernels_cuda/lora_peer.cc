// The peer of LoraProblem: cuBLAS multiplies stacked matrices, and a kernel
// masks the results. This file also checks the results of Weft and of the peer.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "tests/bench/kernels_cuda/lora_problem.h"
#include "tests/bench/kernels_cuda/peer_passes.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

using weft::testing::kEpsilonBf16;
using weft::testing::kEpsilonF32;

constexpr int64_t N = kLoraRows;
constexpr int64_t K = kLoraWidth;

// bf16 elements in device memory that are `stride` apart.
struct Strided {
  const uint16_t* data = nullptr;
  int64_t stride = 0;

  [[nodiscard]] std::vector<uint16_t> Read(int64_t count) const {
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

// Computes S or dS, times the scale.
void LoraProblem::RunPeerShrink(LoraStep step) const {
  const bool of_a = step == LoraStep::kShrink;
  const Bf16Buffer& out = of_a ? peer_->s : peer_->ds;
  // If there is one adapter, its columns need no mask.
  const bool alone = adapters_.size() == 1;
  RunGemm(device_,
          {.m = N,
           .n = total_rank_,
           .k = K,
           .a = {of_a ? activations_.x.data() : activations_.dy.data(), K},
           .b = of_a ? Operand{peer_->a.data(), K, /*transposed=*/true}
                     : Operand{peer_->b.data(), total_rank_},
           .alpha = alone ? kLoraScale : 1,
           .c = out.data(),
           .c_stride = total_rank_});
  if (alone) return;
  MaskColumns(N, total_rank_, rows_each_, peer_->adapter_R.data(),
              peer_->scale_R.data(), out.data());
}

void LoraProblem::RunPeer(LoraStep step) const {
  const int64_t R = total_rank_;
  const Peer& p = *peer_;
  const LoraActivations& a = activations_;
  switch (step) {
    case LoraStep::kShrink:
    case LoraStep::kShrunkGradient:
      return RunPeerShrink(step);
    case LoraStep::kExpand:
      return RunGemm(device_, {.m = N,
                               .n = K,
                               .k = R,
                               .a = {p.s.data(), R},
                               .b = {p.b.data(), R, /*transposed=*/true},
                               .beta = 1,
                               .c = a.y.data(),
                               .c_stride = K});
    case LoraStep::kInputGradient:
      return RunGemm(device_, {.m = N,
                               .n = K,
                               .k = R,
                               .a = {p.ds.data(), R},
                               .b = {p.a.data(), K},
                               .beta = 1,
                               .c = a.dx.data(),
                               .c_stride = K});
    case LoraStep::kGradientOfA:
      return RunGemm(device_, {.m = R,
                               .n = K,
                               .k = N,
                               .a = {p.ds.data(), R, /*transposed=*/true},
                               .b = {a.x.data(), K},
                               .beta = 1,
                               .c = p.da.data(),
                               .c_stride = K,
                               .c_is_f32 = true});
    case LoraStep::kGradientOfB:
      return RunGemm(device_, {.m = K,
                               .n = R,
                               .k = N,
                               .a = {a.dy.data(), K, /*transposed=*/true},
                               .b = {p.s.data(), R},
                               .beta = 1,
                               .c = p.db.data(),
                               .c_stride = R,
                               .c_is_f32 = true});
  }
}

// An element of a result: the sum of factor * left[i] * right[i], plus the old
// value if `adds`.
struct LoraProblem::Element {
  const uint16_t* bf16 = nullptr;  // Points to a bf16 result.
  const float* f32 = nullptr;      // Points to an f32 result.
  bool adds = true;
  double factor = 1;
  int64_t count = 0;
  Strided left, right;

  [[nodiscard]] double Read() const {
    return f32 != nullptr ? ReadOne(f32) : FromBf16(ReadOne(bf16));
  }
};

// An adapter's matrices and results, in Weft's buffers or in the peer's.
struct LoraProblem::Matrices {
  int64_t s_stride = 0;
  int64_t b_stride = 0;
  const uint16_t* s = nullptr;
  const uint16_t* ds = nullptr;
  const uint16_t* a = nullptr;
  const uint16_t* b = nullptr;
  const float* da = nullptr;
  const float* db = nullptr;
};

// Returns an adapter's matrices in Weft's buffers or, if of_peer, in the peer's
// stacked buffers. The peer's S includes the scale, but Weft's S does not.
LoraProblem::Matrices LoraProblem::MatricesOf(int64_t adapter,
                                              bool of_peer) const {
  const auto& [rank, offset, column] = adapters_[static_cast<size_t>(adapter)];
  if (of_peer) {
    return {.s_stride = total_rank_,
            .b_stride = total_rank_,
            .s = peer_->s.data() + column,
            .ds = peer_->ds.data() + column,
            .a = peer_->a.data() + column * K,
            .b = peer_->b.data() + column,
            .da = peer_->da.data() + column * K,
            .db = peer_->db.data() + column};
  }
  return {.s_stride = max_rank_,
          .b_stride = rank,
          .s = s_->data(),
          .ds = ds_->data(),
          .a = weights_->data() + offset,
          .b = weights_->data() + offset + rank * K,
          .da = gradients_->data() + offset,
          .db = gradients_->data() + offset + rank * K};
}

// Returns the element of a step's result at a place, with the terms of its sum.
LoraProblem::Element LoraProblem::ElementOf(LoraStep step, int64_t adapter,
                                            int64_t place, bool of_peer) const {
  const int64_t rank = adapters_[static_cast<size_t>(adapter)].rank;
  const int64_t begin = adapter * rows_each_;
  const bool is_gradient =
      step == LoraStep::kGradientOfA || step == LoraStep::kGradientOfB;
  const int64_t row = begin + Spread(rows_each_, place);
  const int64_t r = Spread(rank, is_gradient ? place : kOtherPlaces[place]);
  const int64_t f = Spread(K, kOtherPlaces[place]);
  const auto [s_stride, b_stride, s, ds, a, b, da, db] =
      MatricesOf(adapter, of_peer);
  const double unscaled = of_peer ? 1 : kLoraScale;
  const LoraActivations& x = activations_;
  switch (step) {
    case LoraStep::kShrink:
      return {.bf16 = s + row * s_stride + r,
              .adds = false,
              .factor = of_peer ? kLoraScale : 1,
              .count = K,
              .left = {x.x.data() + row * K, 1},
              .right = {a + r * K, 1}};
    case LoraStep::kExpand:
      return {.bf16 = x.y.data() + row * K + f,
              .factor = unscaled,
              .count = rank,
              .left = {s + row * s_stride, 1},
              .right = {b + f * b_stride, 1}};
    case LoraStep::kShrunkGradient:
      return {.bf16 = ds + row * s_stride + r,
              .adds = false,
              .factor = kLoraScale,
              .count = K,
              .left = {x.dy.data() + row * K, 1},
              .right = {b + r, b_stride}};
    case LoraStep::kInputGradient:
      return {.bf16 = x.dx.data() + row * K + f,
              .count = rank,
              .left = {ds + row * s_stride, 1},
              .right = {a + f, K}};
    case LoraStep::kGradientOfA:
      return {.f32 = da + r * K + f,
              .count = rows_each_,
              .left = {ds + begin * s_stride + r, s_stride},
              .right = {x.x.data() + begin * K + f, K}};
    case LoraStep::kGradientOfB:
      return {.f32 = db + f * b_stride + r,
              .factor = unscaled,
              .count = rows_each_,
              .left = {x.dy.data() + begin * K + f, K},
              .right = {s + begin * s_stride + r, s_stride}};
  }
  return {};
}

void LoraProblem::CheckStep(LoraStep step, bool of_peer) const {
  const auto last_adapter = static_cast<int64_t>(adapters_.size()) - 1;
  std::vector<Element> elements;
  std::vector<double> expected, largest;
  for (const int64_t adapter : {int64_t{0}, last_adapter / 2, last_adapter}) {
    for (int64_t place = 0; place < kNumPlaces; ++place) {
      const Element e = ElementOf(step, adapter, place, of_peer);
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
  of_peer ? RunPeer(step) : Run(step);
  for (size_t i = 0; i < elements.size(); ++i) {
    CheckNear(elements[i].Read(), expected[i],
              elements[i].f32 != nullptr ? kEpsilonF32 : kEpsilonBf16,
              elements[i].count, largest[i],
              std::string(of_peer ? "the stacked " : "the ") + NameOf(step));
  }
}

void LoraProblem::CheckResults() const {
  for (const LoraStep step : kLoraSteps) {
    CheckStep(step, /*of_peer=*/false);
    if (HasPeer()) CheckStep(step, /*of_peer=*/true);
  }
}

}  // namespace weft::kernels::cuda::bench
