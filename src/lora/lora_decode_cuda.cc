#include "src/lora/lora_decode_cuda.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <utility>

#include "kernels/cuda/lora_decode.h"
#include "src/ops/cuda_arguments.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;

void Check(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "decoding with adapters: ", cudaGetErrorString(status));
}

void CheckRows(const at::Tensor& rows_TF, const RoutingTable& table) {
  TORCH_CHECK(rows_TF.dim() == 2 && rows_TF.is_contiguous() &&
                  rows_TF.scalar_type() == at::kBFloat16 &&
                  rows_TF.size(0) == table.decode_rows(),
              "decoding wants ", table.decode_rows(),
              " contiguous rows in bf16, got ", rows_TF.sizes(), " in ",
              rows_TF.scalar_type());
}

at::Tensor Floats(int64_t count, const at::Tensor& like) {
  return at::empty({count}, like.options().dtype(at::kFloat));
}

k::LoraParts PartsOf(const GroupInput& in) {
  return {
      .data = in.parts.defined() ? in.parts.mutable_data_ptr<float>() : nullptr,
      .count = in.num_parts,
      .stride = in.part_stride};
}

k::DeferredNorm NormOf(const GroupInput& in) {
  if (!in.squares_TP.defined()) return {};
  return {.squares_TP = in.squares_TP.const_data_ptr<float>(),
          .hidden = in.rows_TI.size(1),
          .eps = static_cast<float>(in.eps)};
}

const void* DataOf(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// Returns the input of a group, with memory for `num_parts` partial sums, which
// a launch then writes.
GroupInput EmptyInput(at::Tensor rows_TI, const k::LoraProduct& of_a,
                      int64_t num_parts) {
  GroupInput input = {.rows_TI = std::move(rows_TI),
                      .num_parts = static_cast<int>(num_parts),
                      .part_stride = k::LoraPartStride(of_a.max_rank)};
  if (of_a.max_rank > 0) {
    input.parts = Floats(
        of_a.table.max_few_rows * num_parts * input.part_stride, input.rows_TI);
  }
  return input;
}

}  // namespace

bool TakesDecode(const RoutingTable& table, int64_t num_rows,
                 int64_t head_features) {
  return table.decode_rows() == num_rows &&
         table.max_rank() <= k::kLoraMaxDecodeRank &&
         head_features <= k::kLoraMaxHeadFeatures;
}

GroupInput ShrinkRows(const at::Tensor& rows_TI, const RoutingTable& table,
                      const LoraSite& site) {
  CheckRows(rows_TI, table);
  const k::LoraProduct of_a = table.ProductsOfA(site);
  k::LoraFewRowsProduct product = {.table = of_a.table,
                                   .slot_of_a = of_a.projections[0].slot,
                                   .max_rank = of_a.max_rank,
                                   .x_TI = rows_TI.const_data_ptr(),
                                   .x_stride = rows_TI.stride(0),
                                   .inputs = rows_TI.size(1)};
  GroupInput input = EmptyInput(rows_TI, of_a, LoraFewRowsParts(product).count);
  if (!input.parts.defined()) return input;
  product.workspace = input.parts.mutable_data_ptr<float>();
  Check(RunLoraFewRowsShrink(product, ops::cuda::CurrentStream()));
  return input;
}

void ExpandHeads(const GroupInput& in, const RoutingTable& table, int layer,
                 const at::Tensor& bias_O, const ops::Heads& heads,
                 const at::Tensor& positions_T, const ops::RotaryTable& rotary,
                 const ops::HeadNorms& norms, const ops::KvSlots& slots) {
  const ops::cuda::HeadArguments arguments(heads, positions_T, rotary, norms,
                                           slots);
  const LoraSite site = {layer, ProjectionGroup::kQkv};
  k::LoraHeads launch = {.table = table.table(),
                         .shrunk = PartsOf(in),
                         .norm = NormOf(in),
                         .bias_W = DataOf(bias_O),
                         .rows = arguments.rows,
                         .norms = arguments.norms,
                         .slots = arguments.slots};
  size_t which = 0;
  for (const TargetModule module : ModulesOf(site.group)) {
    launch.projections[which++] = table.ProjectionOf(site, module);
  }
  Check(RunLoraHeads(launch, ops::cuda::CurrentStream()));
}

GroupInput ExpandGate(const GroupInput& in, const RoutingTable& table,
                      int layer, const at::Tensor& bias_O,
                      ops::Activation activation,
                      const at::Tensor& gate_up_T2F) {
  CheckRows(gate_up_T2F, table);
  const int64_t features = gate_up_T2F.size(1) / 2;
  const LoraSite site = {layer, ProjectionGroup::kGateUp};
  const k::LoraProduct of_a =
      table.ProductsOfA({layer, ProjectionGroup::kDown});
  GroupInput down = EmptyInput(
      at::empty({gate_up_T2F.size(0), features}, gate_up_T2F.options()), of_a,
      k::LoraGateParts(features));
  Check(k::RunLoraGate(
      {.table = table.table(),
       .slots_of_b = {table.ProjectionOf(site, TargetModule::kGateProj).slot,
                      table.ProjectionOf(site, TargetModule::kUpProj).slot},
       .slot_of_a = of_a.projections[0].slot,
       .features = features,
       .shrunk = PartsOf(in),
       .norm = NormOf(in),
       .activation = ops::cuda::ActivationOf(activation),
       .gate_up_T2F = gate_up_T2F.const_data_ptr(),
       .bias_2F = DataOf(bias_O),
       .out_TF = down.rows_TI.mutable_data_ptr(),
       .down = PartsOf(down)},
      ops::cuda::CurrentStream()));
  return down;
}

AddedRows ExpandResidual(const GroupInput& in, const RoutingTable& table,
                         const LoraSite& site, const at::Tensor& x_TH,
                         at::Tensor y_TH, const NextNorm& next) {
  CheckRows(x_TH, table);
  CheckRows(y_TH, table);
  const int64_t hidden = y_TH.size(1);
  const TargetModule module = ModulesOf(site.group).front();
  k::LoraResidual launch = {.table = table.table(),
                            .slot_of_b = table.ProjectionOf(site, module).slot,
                            .hidden = hidden,
                            .shrunk = PartsOf(in),
                            .y_TH = y_TH.const_data_ptr(),
                            .x_TH = x_TH.const_data_ptr(),
                            .sum_TH = y_TH.mutable_data_ptr()};
  GroupInput input;
  at::Tensor weight_H;  // Must live until the launch is queued.
  if (next.weight_H.defined()) {
    const k::LoraProduct of_a = table.ProductsOfA(next.site);
    const int64_t num_parts = k::LoraResidualParts(hidden);
    input = EmptyInput(at::empty_like(y_TH), of_a, num_parts);
    input.squares_TP = Floats(y_TH.size(0) * num_parts, y_TH);
    input.eps = next.eps;
    weight_H = next.weight_H.contiguous();
    TORCH_CHECK(weight_H.scalar_type() == at::kBFloat16,
                "decoding wants norms in bf16, got ", weight_H.scalar_type());
    launch.slot_of_a = of_a.projections[0].slot;
    launch.weight_H = weight_H.const_data_ptr();
    launch.scaled_TH = input.rows_TI.mutable_data_ptr();
    launch.squares_TP = input.squares_TP.mutable_data_ptr<float>();
    launch.next = PartsOf(input);
  }
  Check(RunLoraResidual(launch, ops::cuda::CurrentStream()));
  return {.x_TH = std::move(y_TH), .next = std::move(input)};
}

}  // namespace weft::lora::cuda
