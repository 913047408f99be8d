#include "tests/lora/stacked_masked.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace weft::lora {
namespace {

// The matrices of an adapter that has the module, and views of their gradients.
struct Stacked {
  const AdapterVersion* version;
  at::Tensor a_RI, b_OR;
  at::Tensor da_RI, db_OR;
  at::Tensor mask_T1;  // Holds the scale in the adapter's rows and 0 in all
                       // others.
};

std::vector<Stacked> AdaptersWith(TargetModule module,
                                  const LoraRouting& routing,
                                  const LoraGradients& gradients,
                                  const LoraSite& site,
                                  const at::Tensor& x_TI) {
  std::vector<Stacked> adapters;
  for (const LoraSegment& segment : routing) {
    const AdapterVersion& version = *segment.version;
    const at::Tensor gradient_N = GradientOf(gradients, segment.version);
    for (const LoraFactor& factor : version.layout->factors()) {
      if (factor.layer != site.layer || factor.module != module) continue;
      auto known = std::ranges::find(adapters, &version, &Stacked::version);
      if (known == adapters.end()) {
        known = adapters.insert(
            known, {.version = &version,
                    .a_RI = version.A(version.compute_N, factor),
                    .b_OR = version.B(version.compute_N, factor),
                    .da_RI = version.A(gradient_N, factor),
                    .db_OR = version.B(gradient_N, factor),
                    .mask_T1 = at::zeros({x_TI.size(0), 1}, x_TI.options())});
      }
      known->mask_T1.slice(0, segment.begin, segment.end).fill_(factor.scale);
    }
  }
  return adapters;
}

}  // namespace

void AddStackedAndMasked(const at::Tensor& x_TI, const at::Tensor& dy_TO,
                         const LoraRouting& routing,
                         const LoraGradients& gradients, const LoraSite& site,
                         const model_config::ModelShape& shape,
                         at::Tensor& y_TO, at::Tensor& dx_TI) {
  int64_t column = 0;
  for (const TargetModule module : ModulesOf(site.group)) {
    const int64_t out = OutWidth(shape, module);
    const at::Tensor dy_TM = dy_TO.narrow(1, column, out);
    at::Tensor y_TM = y_TO.narrow(1, column, out);
    column += out;
    const std::vector<Stacked> adapters =
        AdaptersWith(module, routing, gradients, site, x_TI);
    if (adapters.empty()) continue;
    std::vector<at::Tensor> a, b, masks;
    for (const Stacked& adapter : adapters) {
      a.push_back(adapter.a_RI);
      b.push_back(adapter.b_OR);
      masks.push_back(
          adapter.mask_T1.expand({x_TI.size(0), adapter.a_RI.size(0)}));
    }
    const at::Tensor a_KI = at::cat(a), b_MK = at::cat(b, 1);
    const at::Tensor mask_TK = at::cat(masks, 1);
    const at::Tensor s_TK = mask_TK * at::mm(x_TI, a_KI.t());
    const at::Tensor ds_TK = mask_TK * at::mm(dy_TM, b_MK);
    y_TM += at::mm(s_TK, b_MK.t());
    dx_TI += at::mm(ds_TK, a_KI);
    const at::Tensor da_KI = at::mm(ds_TK.t(), x_TI);
    const at::Tensor db_MK = at::mm(dy_TM.t(), s_TK);
    int64_t rank = 0;
    for (const Stacked& adapter : adapters) {
      const int64_t own = adapter.a_RI.size(0);
      at::Tensor(adapter.da_RI) += da_KI.narrow(0, rank, own);
      at::Tensor(adapter.db_OR) += db_MK.narrow(1, rank, own);
      rank += own;
    }
  }
}

}  // namespace weft::lora
