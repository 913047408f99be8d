// Compares AddStackedAndMasked, the oracle of the CUDA code, with LoraLinear,
// which works on segments and is compared with autograd. Both in f64.
#include "tests/lora/stacked_masked.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/lora/mixed_routing.h"
#include "tests/support/tensors_near.h"

namespace weft::lora::stacked_masked_test {
namespace {

void ExpectNear(const at::Tensor& actual, const at::Tensor& expected,
                const char* what) {
  weft::ExpectNear(actual, expected, kEpsilonF64, kMixedRows, what);
}

TEST(StackedMaskedTest, IsTheSegmentsWayInF64) {
  at::manual_seed(12);
  const MixedBatch made = MakeMixedBatch();
  for (const LoraSite& site : kMixedSites) {
    SCOPED_TRACE("layer " + std::to_string(site.layer) + " group " +
                 std::to_string(static_cast<int>(site.group)));
    const at::Tensor x_TI = RandomBf16({kMixedRows, InputsOf(site)}, 1);
    const at::Tensor dy_TO = RandomBf16({kMixedRows, OutputsOf(site)}, 1);
    const BaseLinear base = {
        .weight_OI = RandomBf16({OutputsOf(site), InputsOf(site)}, 0.1)};

    const MixedBatch stacked =
        Converted(made, at::kCPU, at::kDouble, at::kDouble);
    at::Tensor y_TO = at::mm(x_TI, base.weight_OI.t());
    at::Tensor dx_TI = at::mm(dy_TO, base.weight_OI);
    AddStackedAndMasked(x_TI, dy_TO, stacked.routing, stacked.gradients, site,
                        kMixedShape, y_TO, dx_TI);

    const MixedBatch batch =
        Converted(made, at::kCPU, at::kDouble, at::kDouble);
    const LoraPass pass = {.routing = batch.routing, .shape = kMixedShape};
    ShrunkInputs shrunk;
    ExpectNear(LoraLinear(x_TI, base, pass, site, &shrunk), y_TO, "y");
    ExpectNear(LoraLinearBackward(dy_TO, x_TI, base, pass, site, shrunk,
                                  batch.gradients,
                                  /*want_input_gradient=*/true),
               dx_TI, "dx");
    for (size_t i = 0; i < made.routing.size(); ++i) {
      ExpectNear(batch.Gradient(i), stacked.Gradient(i), "gradient");
      EXPECT_EQ(at::equal(stacked.Gradient(i), made.Gradient(i)),
                GroupOf(made.routing[i], site).factors.empty());
    }
  }
}

}  // namespace
}  // namespace weft::lora::stacked_masked_test
