#include "src/lora/lora_linear.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "src/lora/lora_bf16.h"
#include "src/lora/lora_cpu.h"
#include "src/lora/lora_cuda.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/matmul.h"

namespace weft::lora {
namespace {

// Returns x A^T of one segment, or an undefined tensor if the segment's adapter
// does not adapt the site.
at::Tensor Shrink(const at::Tensor& x_TI, const LoraSegment& segment,
                  const LoraSite& site) {
  const GroupLayout& group = GroupOf(segment, site);
  if (group.factors.empty()) return {};
  const AdapterVersion& version = *segment.version;
  return at::mm(SegmentRows(x_TI, segment),
                version.StackedA(version.compute_N, group).t());
}

// Adds scale (x A^T) B^T to the segment's rows of y. `input_nR` is x A^T.
void Expand(const at::Tensor& input_nR, const LoraSegment& segment,
            const LoraSite& site, const model_config::ModelShape& shape,
            const at::Tensor& y_TO) {
  const AdapterVersion& version = *segment.version;
  int64_t column = 0;
  for (const LoraFactor& factor : GroupOf(segment, site).factors) {
    at::Tensor y_view =
        SegmentRows(y_TO, segment)
            .narrow(1, LoraSite::ColumnOf(factor.module, shape), factor.out);
    at::addmm_out(y_view, y_view, input_nR.narrow(1, column, factor.rank),
                  version.B(version.compute_N, factor).t(), /*beta=*/1,
                  /*alpha=*/factor.scale);
    column += factor.rank;
  }
}

// Adds dLoss/dA and dLoss/dB to `gradient_N`, and the adapter's part of
// dLoss/dx to the segment's rows of `dx_TI`. `input_nR` is x A^T. Skips
// `gradient_N` or `dx_TI` if it is undefined.
void SegmentBackward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                     const LoraSegment& segment, const LoraSite& site,
                     const model_config::ModelShape& shape,
                     const at::Tensor& input_nR, const at::Tensor& gradient_N,
                     const at::Tensor& dx_TI) {
  const GroupLayout& group = GroupOf(segment, site);
  const AdapterVersion& version = *segment.version;
  const at::Tensor ds_nR = at::empty_like(input_nR);
  int64_t column = 0;
  for (const LoraFactor& factor : group.factors) {
    const at::Tensor dy_view =
        SegmentRows(dy_TO, segment)
            .narrow(1, LoraSite::ColumnOf(factor.module, shape), factor.out);
    at::Tensor ds_view = ds_nR.narrow(1, column, factor.rank);
    // ds includes the scale, so that one product by A serves all factors.
    at::addmm_out(ds_view, ds_view, dy_view,
                  version.B(version.compute_N, factor), /*beta=*/0,
                  /*alpha=*/factor.scale);
    if (gradient_N.defined()) {
      AddProduct(version.B(gradient_N, factor), dy_view.t(),
                 input_nR.narrow(1, column, factor.rank), factor.scale);
    }
    column += factor.rank;
  }
  if (gradient_N.defined()) {
    AddProduct(version.StackedA(gradient_N, group), ds_nR.t(),
               SegmentRows(x_TI, segment), /*scale=*/1);
  }
  if (dx_TI.defined()) {
    at::Tensor dx_view = SegmentRows(dx_TI, segment);
    at::addmm_out(dx_view, dx_view, ds_nR,
                  version.StackedA(version.compute_N, group));
  }
}

// Returns whether the functions of lora_bf16.h compute the layer, for rows of x
// or dy. They do if a CPU computes the base product in bf16 and some rows have
// adapters. Experts are excluded, because an expert has too few rows for bf16
// to pay off.
bool TakesBf16(const at::Tensor& rows, const BaseLinear& base,
               const LoraPass& pass, const LoraSite& site) {
  return !pass.routing.empty() && site.expert == kNoExpert &&
         ops::IsBf16Product(rows, base.weight_OI);
}

// Returns the layer's output without adapters.
at::Tensor BaseOutput(const at::Tensor& x_TI, const BaseLinear& base) {
  return base.groups != nullptr
             ? ops::GroupedLinear(x_TI, base.weight_OI, base.bias_O,
                                  *base.groups)
             : ops::Linear(x_TI, base.weight_OI, base.bias_O);
}

// Returns dLoss/dx without the adapters' part.
at::Tensor BaseGradient(const at::Tensor& dy_TO, const BaseLinear& base) {
  return base.groups != nullptr
             ? ops::GroupedMatMul(dy_TO, base.weight_OI, *base.groups)
             : ops::MatMul(dy_TO, base.weight_OI);
}

}  // namespace

void AddProduct(at::Tensor gradient, const at::Tensor& a, const at::Tensor& b,
                double scale) {
  const at::ScalarType dtype = gradient.scalar_type();
  if (a.scalar_type() == dtype) {
    // A and B have fixed sizes, so the smaller operand may take the scale.
    if (a.numel() <= b.numel()) return ops::AddMatMul(gradient, a, b, scale);
    ops::AddMatMul(gradient, a, scale == 1 ? b : b * scale, /*scale=*/1);
  } else if (a.is_cuda()) {
    gradient.add_(at::mm(a, b, dtype), scale);
  } else {
    gradient.add_(at::mm(a.to(dtype), b.to(dtype)), scale);
  }
}

int64_t LoraSite::ColumnOf(TargetModule module,
                           const model_config::ModelShape& shape) {
  switch (module) {
    case TargetModule::kKProj:
      return OutWidth(shape, TargetModule::kQProj);
    case TargetModule::kVProj:
      return OutWidth(shape, TargetModule::kQProj) + shape.kv_width;
    case TargetModule::kUpProj:
      return shape.ffn;
    case TargetModule::kInProjZ:
      return shape.delta.conv_width();
    case TargetModule::kInProjB:
    case TargetModule::kInProjBa:
      return shape.delta.conv_width() + shape.delta.value_width();
    case TargetModule::kInProjA:
      return shape.delta.conv_width() + shape.delta.value_width() +
             shape.delta.value_heads;
    default:
      return 0;
  }
}

RoutingTablePtr MakeRoutingTable(const LoraRouting& routing,
                                 const LoraGradients& gradients,
                                 const model_config::ModelShape& shape,
                                 at::ScalarType dtype, at::Device device,
                                 bool decode) {
  if constexpr (ops::kHasCudaKernels) {
    if (cuda::TakesSegments(routing, dtype, device)) {
      return std::make_shared<cuda::RoutingTable>(routing, gradients, shape,
                                                  device, decode);
    }
  }
  return nullptr;
}

RoutingTablePtr MakeExpertTable(const ExpertRouting& routing, int layer,
                                const LoraGradients& gradients,
                                const model_config::ModelShape& shape,
                                at::ScalarType dtype, at::Device device) {
  if constexpr (ops::kHasCudaKernels) {
    if (cuda::TakesSegments(routing.segments, dtype, device) &&
        cuda::FitsExpertTable(routing)) {
      return std::make_shared<cuda::ExpertTable>(routing, layer, gradients,
                                                 shape, device);
    }
  }
  return nullptr;
}

bool FindsExpertRows(const LoraPass& pass) {
  if constexpr (ops::kHasCudaKernels) {
    if (pass.table != nullptr) return pass.table->is_decode();
  }
  return pass.routing.empty();
}

RoutingTablePtr FindExpertRows(const LoraPass& pass, int layer,
                               const at::Tensor& experts_TK,
                               const at::Tensor& pairs_N) {
  if constexpr (ops::kHasCudaKernels) {
    if (pass.table != nullptr) {
      return pass.table->OfExperts(layer, experts_TK, pairs_N,
                                   ops::cuda::CurrentStream());
    }
  }
  return nullptr;
}

int64_t GradientWorkspaceBytes(int64_t num_rows,
                               const model_config::ModelShape& shape,
                               int64_t rank) {
  namespace k = kernels::cuda;
  const auto padded = [](int64_t x) {
    return ops::CeilDiv(x, k::LoraRankTile(x)) * k::LoraRankTile(x);
  };
  // A gradient's sum over rows is split into partial sums, called parts.
  // `elements` becomes the size of the largest part of any group, rounded up to
  // whole tiles.
  int64_t elements = 0;
  const auto count_group = [&](ProjectionGroup group) {
    const auto modules = ModulesOf(group);
    const auto num_modules = static_cast<int64_t>(modules.size());
    const int64_t in = InWidth(shape, modules.front());
    int64_t tiles_of_b = 0;
    for (const TargetModule module : modules) {
      tiles_of_b += ops::CeilDiv(OutWidth(shape, module), k::kLoraTileFeatures);
    }
    const int64_t tiles_of_a = ops::CeilDiv(in, k::kLoraTileFeatures);
    elements = std::max({elements, tiles_of_b * padded(rank),
                         tiles_of_a * padded(num_modules * rank)});
  };
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    if (layer > 0 && shape.delta.InLayer(layer) == shape.delta.InLayer(0)) {
      continue;
    }
    std::ranges::for_each(GroupsOf(shape, layer), count_group);
  }
  elements *= k::kLoraTileFeatures;
  // An adapter with one part needs no workspace, and kLoraPartRows + 1 rows are
  // the fewest that have two parts. So the worst case has as many adapters with
  // this number of rows as possible. One of them also has the remaining rows.
  const int64_t adapters = num_rows / (k::kLoraPartRows + 1);
  const int64_t parts =
      adapters == 0 ? 0 : adapters + (num_rows - adapters) / k::kLoraPartRows;
  return parts * elements * static_cast<int64_t>(sizeof(float));
}

ShrunkInputs LoraShrink(const at::Tensor& x_TI, const BaseLinear& base,
                        const LoraPass& pass, const LoraSite& site) {
  if constexpr (ops::kHasCudaKernels) {
    if (pass.table != nullptr) {
      return {
          cuda::Shrink(x_TI, *pass.table, site, ops::cuda::CurrentStream())};
    }
  }
  if (TakesBf16(x_TI, base, pass, site)) return bf16::Shrink(x_TI, pass, site);
  if (ops::HasCpuKernel(x_TI)) {
    return cpu::Forward(x_TI, pass, site, /*y_TO=*/{});
  }
  ShrunkInputs shrunk;
  for (const LoraSegment& segment : pass.routing) {
    shrunk.push_back(Shrink(x_TI, segment, site));
  }
  return shrunk;
}

at::Tensor LoraLinear(const at::Tensor& x_TI, const BaseLinear& base,
                      const LoraPass& pass, const LoraSite& site,
                      ShrunkInputs* shrunk) {
  if (TakesBf16(x_TI, base, pass, site)) {
    ShrunkInputs inputs;
    at::Tensor y_TO = bf16::Forward(x_TI, base, pass, site, inputs);
    if (shrunk != nullptr) *shrunk = std::move(inputs);
    return y_TO;
  }
  at::Tensor y_TO = BaseOutput(x_TI, base);
  if constexpr (ops::kHasCudaKernels) {
    if (pass.table != nullptr) {
      at::Tensor s_TR =
          cuda::Forward(x_TI, *pass.table, site, shrunk != nullptr, y_TO,
                        ops::cuda::CurrentStream());
      if (shrunk != nullptr) *shrunk = {std::move(s_TR)};
      return y_TO;
    }
  }
  ShrunkInputs inputs;
  if (ops::HasCpuKernel(x_TI)) {
    inputs = cpu::Forward(x_TI, pass, site, y_TO);
  } else {
    for (const LoraSegment& segment : pass.routing) {
      inputs.push_back(Shrink(x_TI, segment, site));
      Expand(inputs.back(), segment, site, pass.shape, y_TO);
    }
  }
  if (shrunk != nullptr) *shrunk = std::move(inputs);
  return y_TO;
}

at::Tensor LoraLinearBackward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                              const BaseLinear& base, const LoraPass& pass,
                              const LoraSite& site, const ShrunkInputs& shrunk,
                              const LoraGradients& gradients,
                              bool want_input_gradient) {
  if (TakesBf16(dy_TO, base, pass, site)) {
    return bf16::Backward(dy_TO, x_TI, base, pass, site, shrunk, gradients,
                          want_input_gradient);
  }
  at::Tensor dx_TI;
  if (want_input_gradient) dx_TI = BaseGradient(dy_TO, base);
  if constexpr (ops::kHasCudaKernels) {
    if (pass.table != nullptr) {
      cuda::Backward(dy_TO, x_TI, shrunk.front(), *pass.table, site, dx_TI,
                     ops::cuda::CurrentStream());
      return dx_TI;
    }
  }
  if (ops::HasCpuKernel(x_TI)) {
    cpu::Backward(dy_TO, x_TI, pass, site, shrunk, gradients, dx_TI);
    return dx_TI;
  }
  for (size_t i = 0; i < pass.routing.size(); ++i) {
    if (!shrunk[i].defined()) continue;
    const LoraSegment& segment = pass.routing[i];
    SegmentBackward(dy_TO, x_TI, segment, site, pass.shape, shrunk[i],
                    GradientOf(gradients, segment.version), dx_TI);
  }
  return dx_TI;
}

}  // namespace weft::lora
