// Compares the ops that pass CUDA tensors to kernels/cuda with the same ops on
// the CPU in f64. Other tests compare the CPU's ops with autograd. Also runs
// on the device of tests/support/host_device (tests/model).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "src/ops/gated_product.h"
#include "src/ops/paged_attention.h"
#include "src/ops/rms_norm.h"
#include "src/ops/rotary.h"
#include "src/ops/tree_attention.h"
#include "src/ops/vocab_rows.h"
#include "tests/support/dtype_name.h"
#include "tests/support/tolerance.h"

namespace weft::ops {
namespace {

class CudaOpsTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(5);
  }

  static double Epsilon() {
    return GetParam() == at::kFloat ? kEpsilonF32 : kEpsilonBf16;
  }
  // Returns numbers that the dtype holds exactly, as f64 on the CPU.
  static at::Tensor Random(at::IntArrayRef sizes, double scale = 1) {
    return (at::randn(sizes, at::kDouble) * scale)
        .to(GetParam())
        .to(at::kDouble);
  }
  static at::Tensor OnDevice(const at::Tensor& x) {
    return x.to(at::TensorOptions(at::kCUDA).dtype(GetParam()));
  }
  static void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                          double tolerance) {
    EXPECT_TRUE(
        at::allclose(actual.cpu().to(at::kDouble), expected, 0, tolerance));
  }
};

TEST_P(CudaOpsTest, RmsNormIsThatOfTheCpu) {
  for (const int64_t features : {1, 64, 577}) {
    // The tensors are views of wider ones, so the row stride is not D.
    const at::Tensor wide = Random({9, features + 7});
    const at::Tensor dy = Random({9, features}), weight = Random({features});
    const auto run = [&](at::Tensor all, const at::Tensor& d,
                         const at::Tensor& w) {
      const at::Tensor x = all.narrow(1, 3, features);
      at::Tensor y = at::empty_like(d), dx = at::ones_like(d);
      RmsNorm(x, w, 1e-5, y);
      RmsNormBackward(d, x, w, 1e-5, dx);
      return at::stack({y, dx});
    };
    const double smallest = wide.abs().min().item<double>();
    ExpectClose(run(OnDevice(wide), OnDevice(dy), OnDevice(weight)),
                run(wide, dy, weight),
                StoredTolerance(Epsilon(), features,
                                features == 1 ? 16 + 16 / smallest : 16, 16));
  }
}

TEST_P(CudaOpsTest, AddRmsNormIsThatOfTheCpu) {
  const at::Tensor x = Random({9, 576}), y = Random({9, 576});
  const at::Tensor weight = Random({576});
  const auto run = [&](const at::Tensor& a, at::Tensor sum,
                       const at::Tensor& w) {
    at::Tensor normed = at::empty_like(a);
    AddRmsNorm(a, w, 1e-5, sum, normed);
    return at::stack({sum, normed});
  };
  // The norm reads the sum after it has been stored in the dtype.
  ExpectClose(run(OnDevice(x), OnDevice(y), OnDevice(weight)),
              run(x, y.clone(), weight),
              StoredTolerance(Epsilon(), 576, 16, 32));
}

TEST_P(CudaOpsTest, HeadsArePreparedAsOnTheCpu) {
  const at::Tensor positions = at::randint(0, 50, {37}, at::kInt);
  const at::Tensor slots = at::randperm(48, at::kLong).narrow(0, 0, 37);
  const at::Tensor x = Random({37, 7, 64}), d = Random({37, 7, 64});
  const at::Tensor q_norm = Random({64}), k_norm = Random({64});
  const auto split = [](const at::Tensor& all) {
    return Heads{all.narrow(1, 0, 3), all.narrow(1, 3, 2), all.narrow(1, 5, 2)};
  };
  for (const bool with_norms : {false, true}) {
    const auto run = [&](const at::Tensor& fused, const at::Tensor& gradient,
                         HeadNorms norms) {
      const at::Device device = fused.device();
      const RotaryTable table =
          MakeRotaryTable(std::vector<double>(32, 0.3), 50, device);
      if (!with_norms) norms = {};
      const at::Tensor after = fused.clone(), dx = at::zeros_like(gradient);
      const KvSlots places = {slots.to(device),
                              at::zeros({3, 16, 2, 64}, fused.options()),
                              at::zeros({3, 16, 2, 64}, fused.options())};
      PrepareHeads(split(after), positions.to(device), table, norms, places);
      PrepareHeadsBackward(split(gradient), positions.to(device), table, norms,
                           split(fused), split(dx));
      return at::cat({after.flatten(), dx.flatten(),
                      places.k_pages_PSKC.flatten(),
                      places.v_pages_PSKC.flatten()});
    };
    ExpectClose(run(OnDevice(x), OnDevice(d),
                    {OnDevice(q_norm), OnDevice(k_norm), 1e-5}),
                run(x, d, {q_norm, k_norm, 1e-5}),
                StoredTolerance(Epsilon(), 64, 32, 64));
  }
}

TEST_P(CudaOpsTest, GatedProductIsThatOfTheCpu) {
  const at::Tensor gate_up = Random({29, 2 * 1537}, 3);
  const at::Tensor dout = Random({29, 1537});
  for (const Activation activation :
       {Activation::kSilu, Activation::kGeluTanh, Activation::kClampedSilu}) {
    const auto run = [&](at::Tensor g, const at::Tensor& d) {
      const at::Tensor out = GatedProduct(activation, g);
      GatedProductBackward(activation, d, g);
      return at::cat({out, g}, 1);
    };
    ExpectClose(run(OnDevice(gate_up), OnDevice(dout)),
                run(gate_up.clone(), dout),
                StoredTolerance(Epsilon(), 1, 150, 150));
  }
}

TEST_P(CudaOpsTest, PagedAttentionIsThatOfTheCpu) {
  // The second sequence is long enough to be split.
  const at::Tensor lengths = at::tensor(std::vector<int>{5, 900}, at::kInt);
  const at::Tensor table = at::randperm(120, at::kInt).view({2, 60});
  const at::Tensor q = Random({2, 6, 64});
  const at::Tensor k = Random({120, 16, 2, 64}), v = Random({120, 16, 2, 64});
  const at::Tensor sinks = at::randn({6});
  for (const int64_t window : {0, 50}) {
    const AttentionRule rule = {.scale = 0.125, .window = window};
    const auto run = [&](const at::Tensor& q_in, const at::Tensor& k_in,
                         const at::Tensor& v_in, const at::Tensor& sinks_in) {
      at::Tensor out = at::empty_like(q_in);
      PagedAttention(q_in, k_in, v_in, table.to(q_in.device()),
                     lengths.to(q_in.device()), rule, out, sinks_in);
      return out;
    };
    // The sinks are f32 for rows of f32 and of bf16.
    ExpectClose(run(OnDevice(q), OnDevice(k), OnDevice(v), sinks.to(at::kCUDA)),
                run(q, k, v, sinks.to(at::kDouble)),
                StoredTolerance(Epsilon(), 964, 1, 1));
  }
}

TEST_P(CudaOpsTest, MergeByLseIsThatOfTheCpu) {
  const at::Tensor out = Random({7, 3, 40}), part = Random({7, 3, 40});
  const at::Tensor lse = at::randn({7, 3}), part_lse = at::randn({7, 3});
  const auto run = [](at::Tensor o, at::Tensor l, const at::Tensor& other,
                      const at::Tensor& other_lse) {
    MergeByLse({other, other_lse}, o, l);
    return at::cat({o.to(l.dtype()), l.unsqueeze(2)}, 2);
  };
  // The log-sum-exps are f32 for rows of any dtype.
  ExpectClose(
      run(OnDevice(out), lse.to(at::kCUDA), OnDevice(part),
          part_lse.to(at::kCUDA)),
      run(out.clone(), lse.to(at::kDouble), part, part_lse.to(at::kDouble)),
      Tolerance(Epsilon(), 2, 5));
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, CudaOpsTest,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         weft::testing::DtypeName);

TEST(CudaVocabRowsTest, AreThoseOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(6);
  const at::Tensor logits = at::randn({3, 10007}) * 8;
  for (const double softcap : {0.0, 30.0}) {
    const auto run = [&](at::Tensor buffer) {
      const at::Device device = buffer.device();
      const VocabRowsInput input = {
          at::tensor(std::vector<int64_t>{0, 2, 2, 3}, at::kLong).to(device),
          at::tensor(std::vector<int64_t>{7, 10006, 0}, at::kLong).to(device),
          at::tensor(std::vector<float>{1, 0.7F, 2}).to(device), softcap};
      at::Tensor logprobs = at::empty({3}, buffer.options());
      at::Tensor entropy = at::empty({3}, buffer.options());
      VocabRows(buffer, input, /*softmax_in_place=*/true, logprobs, entropy);
      return at::cat({logprobs, entropy, buffer.flatten()})
          .cpu()
          .to(at::kDouble);
    };
    EXPECT_TRUE(at::allclose(run(logits.to(at::kCUDA)),
                             run(logits.to(at::kDouble)), 0,
                             Tolerance(kEpsilonF32, 1, 100)));
  }
}

TEST(CudaVocabWeightsTest, TimesTheirScaleAreTheSoftmaxOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(7);
  const at::Tensor logits = at::randn({3, 10000}) * 8;
  VocabRowsInput input = {at::tensor({0, 1, 1, 3}, at::kLong),
                          at::tensor({5, 0, 9999}, at::kLong),
                          at::tensor({1.0F, 0.5F, 2.0F}, at::kFloat)};
  input.clear_targets = true;
  at::Tensor expected = logits.to(at::kDouble);
  at::Tensor logprobs = at::empty({3}, at::kDouble), none;
  VocabRows(expected, input, /*softmax_in_place=*/true, logprobs, none);
  const at::Tensor on_device = logits.to(at::kCUDA);
  for (at::Tensor* x :
       {&input.row_offsets, &input.targets_E, &input.temperature_R}) {
    *x = x->to(at::kCUDA);
  }
  at::Tensor weights =
      at::empty(logits.sizes(), on_device.options().dtype(at::kBFloat16));
  at::Tensor scale = at::empty({3}, on_device.options());
  at::Tensor actual = at::empty({3}, on_device.options());
  VocabWeights(on_device, input, weights, scale, actual, none);
  EXPECT_TRUE(at::allclose(actual.cpu().to(at::kDouble), logprobs, 0,
                           Tolerance(kEpsilonF32, 1, 100)));
  EXPECT_TRUE(
      at::allclose(weights.cpu().to(at::kDouble) * scale.cpu().unsqueeze(1),
                   expected, kEpsilonBf16, Tolerance(kEpsilonF32, 1, 100)));
}

}  // namespace
}  // namespace weft::ops
