#include "src/lora/lora_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cuda/lora_gradient.h"
#include "kernels/cuda/lora_product.h"

namespace weft::lora::cuda {
namespace {

namespace k = kernels::cuda;
using k::LoraGradientItem;
using k::LoraProductItem;

// Blocks that keep every processor of today's devices busy; sums are split to
// reach them as long as a part has this many elements.
constexpr int64_t kWantedBlocks = 264;
constexpr int64_t kMinPartDepth = 256;
constexpr int64_t kMaxSplits = 64;

int NumSplits(int64_t num_items, int64_t tiles_per_item, int64_t depth) {
  const int64_t blocks = std::max<int64_t>(1, num_items * tiles_per_item);
  return static_cast<int>(std::clamp<int64_t>(
      std::min(kWantedBlocks / blocks, depth / kMinPartDepth), 1, kMaxSplits));
}

int64_t Tiles(int64_t columns) {
  return (columns + k::kLoraTileSide - 1) / k::kLoraTileSide;
}

// The items where the kernels read them.
template <typename Item>
at::Tensor Upload(const std::vector<Item>& items, const at::Tensor& like) {
  const auto num_bytes = static_cast<int64_t>(items.size() * sizeof(Item));
  // Pinned, so that the copy waits for nothing; its memory is reused only when
  // the stream has read it.
  const at::Tensor host = at::empty(
      {num_bytes}, at::TensorOptions(at::kByte).pinned_memory(like.is_cuda()));
  std::memcpy(host.mutable_data_ptr(), items.data(),
              static_cast<size_t>(num_bytes));
  return host.to(like.device(), at::kByte, /*non_blocking=*/true);
}

at::Tensor Workspace(int64_t num_floats, const at::Tensor& like) {
  return at::empty({num_floats}, like.options().dtype(at::kFloat));
}

void Check(cudaError_t status, const char* what) {
  TORCH_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

// x and y, 2-D with unit stride in their columns.
void RunProduct(const std::vector<LoraProductItem>& items,
                k::LoraWeightOrder order, bool adds, const at::Tensor& x,
                const at::Tensor& y, CUstream_st* stream) {
  if (items.empty()) return;
  k::LoraProduct product = {.num_items = static_cast<int64_t>(items.size()),
                            .order = order,
                            .adds = adds,
                            .x_TI = x.const_data_ptr(),
                            .x_stride = x.stride(0),
                            .y_TO = y.mutable_data_ptr(),
                            .y_stride = y.stride(0)};
  int64_t depth = 0;
  for (const LoraProductItem& item : items) {
    product.max_outputs = std::max(product.max_outputs, item.num_outputs);
    depth = std::max(depth, item.num_inputs);
  }
  product.num_splits =
      NumSplits(product.num_items, Tiles(product.max_outputs), depth);
  const at::Tensor on_device = Upload(items, x);
  product.items =
      reinterpret_cast<const LoraProductItem*>(on_device.const_data_ptr());
  const at::Tensor workspace = Workspace(LoraProductWorkspace(product), x);
  product.workspace = workspace.mutable_data_ptr<float>();
  Check(k::RunLoraProduct(product, stream), "product of the adapters");
}

void AddGradients(const std::vector<LoraGradientItem>& items,
                  const at::Tensor& p, const at::Tensor& q,
                  CUstream_st* stream) {
  if (items.empty()) return;
  k::LoraGradient gradient = {.num_items = static_cast<int64_t>(items.size()),
                              .p_TP = p.const_data_ptr(),
                              .p_stride = p.stride(0),
                              .q_TQ = q.const_data_ptr(),
                              .q_stride = q.stride(0)};
  int64_t depth = 0;
  for (const LoraGradientItem& item : items) {
    gradient.max_p = std::max(gradient.max_p, item.num_p);
    gradient.max_q = std::max(gradient.max_q, item.num_q);
    depth = std::max(depth, item.num_rows);
  }
  gradient.num_splits = NumSplits(
      gradient.num_items, Tiles(gradient.max_p) * Tiles(gradient.max_q), depth);
  const at::Tensor on_device = Upload(items, p);
  gradient.items =
      reinterpret_cast<const LoraGradientItem*>(on_device.const_data_ptr());
  const at::Tensor workspace = Workspace(LoraGradientWorkspace(gradient), p);
  gradient.workspace = workspace.mutable_data_ptr<float>();
  Check(k::AddLoraGradient(gradient, stream), "gradient of the adapters");
}

// Adds one copy of `item` per kLoraItemRows rows of the segment.
void AddRows(const LoraSegment& segment, LoraProductItem item,
             std::vector<LoraProductItem>* items) {
  for (int64_t row = segment.begin; row < segment.end;
       row += k::kLoraItemRows) {
    item.row = row;
    item.num_rows = std::min(k::kLoraItemRows, segment.end - row);
    items->push_back(item);
  }
}

// One matrix of the packed rows for what belongs to S.
at::Tensor EmptyShrunk(const at::Tensor& like_TI, const LoraRouting& routing,
                       const LoraSite& site) {
  int64_t columns = 0;
  for (const LoraSegment& segment : routing) {
    columns = std::max(columns, GroupOf(segment, site).total_rank);
  }
  return at::empty({like_TI.size(0), columns}, like_TI.options());
}

// The S that the segments' entries are views into; undefined without any.
at::Tensor WholeShrunk(const ShrunkInputs& shrunk, int64_t num_rows) {
  for (const at::Tensor& view_nR : shrunk) {
    if (!view_nR.defined()) continue;
    const int64_t columns = view_nR.stride(0);
    const auto num_bytes = static_cast<int64_t>(view_nR.storage().nbytes());
    const int64_t rows =
        num_bytes / static_cast<int64_t>(view_nR.element_size()) / columns;
    TORCH_CHECK(rows == num_rows, "the forward pass kept ", rows,
                " rows of x A^T, the backward pass has ", num_rows);
    return view_nR.as_strided({rows, columns}, {columns, 1}, 0);
  }
  return {};
}

LoraProductItem ItemOfA(const LoraSegment& segment, const GroupLayout& group) {
  const AdapterVersion& version = *segment.version;
  return {
      .num_inputs = group.factors.front().in,
      .num_outputs = group.total_rank,
      .weight = version.StackedA(version.compute_N, group).const_data_ptr()};
}

// s B^T of one factor, whose part of S begins at `column`.
LoraProductItem ItemOfB(const LoraSegment& segment, const LoraFactor& factor,
                        int64_t column, const ModelShape& shape) {
  const AdapterVersion& version = *segment.version;
  return {.x_column = column,
          .num_inputs = factor.rank,
          .y_column = LoraSite::ColumnOf(factor.module, shape),
          .num_outputs = factor.out,
          .weight = version.B(version.compute_N, factor).const_data_ptr(),
          .scale = static_cast<float>(factor.scale)};
}

// The same product seen from dS = scale dY B.
LoraProductItem Transposed(LoraProductItem item) {
  std::swap(item.x_column, item.y_column);
  std::swap(item.num_inputs, item.num_outputs);
  return item;
}

// Items of which no two add to the same gradient.
struct GradientRound {
  std::vector<const void*> gradients;
  std::vector<LoraGradientItem> of_a;  // dS^T X.
  std::vector<LoraGradientItem> of_b;  // dY^T S.
};

GradientRound& RoundFor(const at::Tensor& gradient_N,
                        std::vector<GradientRound>* rounds) {
  const void* data = gradient_N.const_data_ptr();
  for (GradientRound& round : *rounds) {
    if (std::ranges::find(round.gradients, data) == round.gradients.end()) {
      round.gradients.push_back(data);
      return round;
    }
  }
  rounds->push_back({.gradients = {data}});
  return rounds->back();
}

std::vector<GradientRound> GradientRounds(const LoraRouting& routing,
                                          const LoraSite& site,
                                          const ModelShape& shape) {
  std::vector<GradientRound> rounds;
  for (const LoraSegment& segment : routing) {
    const GroupLayout& group = GroupOf(segment, site);
    if (group.factors.empty() || !segment.gradient_N.defined()) continue;
    const AdapterVersion& version = *segment.version;
    GradientRound& round = RoundFor(segment.gradient_N, &rounds);
    const int64_t num_rows = segment.end - segment.begin;
    // dS has the scale already.
    round.of_a.push_back(
        {.row = segment.begin,
         .num_rows = num_rows,
         .num_p = group.total_rank,
         .num_q = group.factors.front().in,
         .gradient_PQ = version.StackedA(segment.gradient_N, group)
                            .mutable_data_ptr<float>()});
    int64_t column = 0;
    for (const LoraFactor& factor : group.factors) {
      round.of_b.push_back(
          {.row = segment.begin,
           .num_rows = num_rows,
           .p_column = LoraSite::ColumnOf(factor.module, shape),
           .num_p = factor.out,
           .q_column = column,
           .num_q = factor.rank,
           .gradient_PQ =
               version.B(segment.gradient_N, factor).mutable_data_ptr<float>(),
           .scale = static_cast<float>(factor.scale)});
      column += factor.rank;
    }
  }
  return rounds;
}

}  // namespace

bool TakesSegments(const at::Tensor& x_TI, const LoraRouting& routing) {
  if (!x_TI.is_cuda() || x_TI.scalar_type() != at::kBFloat16) return false;
  return std::ranges::all_of(routing, [](const LoraSegment& segment) {
    return segment.version->compute_N.scalar_type() == at::kBFloat16 &&
           (!segment.gradient_N.defined() ||
            segment.gradient_N.scalar_type() == at::kFloat);
  });
}

ShrunkInputs Shrink(const at::Tensor& x_TI, const LoraRouting& routing,
                    const LoraSite& site, CUstream_st* stream) {
  const at::Tensor all_TR = EmptyShrunk(x_TI, routing, site);
  std::vector<LoraProductItem> items;
  ShrunkInputs shrunk(routing.size());
  for (size_t i = 0; i < routing.size(); ++i) {
    const LoraSegment& segment = routing[i];
    const GroupLayout& group = GroupOf(segment, site);
    if (group.factors.empty()) continue;
    AddRows(segment, ItemOfA(segment, group), &items);
    shrunk[i] = all_TR.narrow(0, segment.begin, segment.end - segment.begin)
                    .narrow(1, 0, group.total_rank);
  }
  RunProduct(items, k::LoraWeightOrder::kOutputsByInputs, /*adds=*/false, x_TI,
             all_TR, stream);
  return shrunk;
}

void Expand(const ShrunkInputs& shrunk, const LoraRouting& routing,
            const LoraSite& site, const ModelShape& shape, at::Tensor& y_TO,
            CUstream_st* stream) {
  const at::Tensor all_TR = WholeShrunk(shrunk, y_TO.size(0));
  std::vector<LoraProductItem> items;
  for (const LoraSegment& segment : routing) {
    int64_t column = 0;
    for (const LoraFactor& factor : GroupOf(segment, site).factors) {
      AddRows(segment, ItemOfB(segment, factor, column, shape), &items);
      column += factor.rank;
    }
  }
  RunProduct(items, k::LoraWeightOrder::kOutputsByInputs, /*adds=*/true, all_TR,
             y_TO, stream);
}

void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const LoraRouting& routing, const LoraSite& site,
              const ModelShape& shape, const ShrunkInputs& shrunk,
              at::Tensor& dx_TI, CUstream_st* stream) {
  const at::Tensor all_TR = WholeShrunk(shrunk, dy_TO.size(0));
  if (!all_TR.defined()) return;
  const at::Tensor ds_TR = at::empty_like(all_TR);
  std::vector<LoraProductItem> of_b, of_a;
  for (const LoraSegment& segment : routing) {
    const GroupLayout& group = GroupOf(segment, site);
    if (group.factors.empty()) continue;
    AddRows(segment, Transposed(ItemOfA(segment, group)), &of_a);
    int64_t column = 0;
    for (const LoraFactor& factor : group.factors) {
      AddRows(segment, Transposed(ItemOfB(segment, factor, column, shape)),
              &of_b);
      column += factor.rank;
    }
  }
  RunProduct(of_b, k::LoraWeightOrder::kInputsByOutputs, /*adds=*/false, dy_TO,
             ds_TR, stream);
  for (const GradientRound& round : GradientRounds(routing, site, shape)) {
    AddGradients(round.of_b, dy_TO, all_TR, stream);
    AddGradients(round.of_a, ds_TR, x_TI, stream);
  }
  if (!dx_TI.defined()) return;
  RunProduct(of_a, k::LoraWeightOrder::kInputsByOutputs, /*adds=*/true, ds_TR,
             dx_TI, stream);
}

}  // namespace weft::lora::cuda
